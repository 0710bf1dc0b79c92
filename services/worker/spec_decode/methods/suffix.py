"""Suffix decoding: drafts what followed the longest match in the same sequence or in past outputs (arXiv
2411.04975).

The longer the match, the longer the draft; it ends where the matches' continuations disagree. Frequencies are those of
a suffix tree, but no tree is kept: matches are found by comparing backwards from the occurrences of the last tokens,
and followed forward from there.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.services.worker.spec_decode.history import TokenHistory
from quire.services.worker.spec_decode.methods.past_outputs import BOUNDARY, MAX_MATCHES, PastOutputs
from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer
from quire.services.worker.step.drafts.drafts import Drafts
from quire.shared.columns import I32

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class SuffixRule:
    """Limits of suffix decoding: tokens compared at most, drafts per matching token, and least estimated probability of
    a whole draft."""

    max_depth: int
    max_spec_factor: float
    min_token_prob: float


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A draft, and the expected number of its tokens to be accepted."""

    tokens: list[int]
    score: float


class Suffix:
    """Drafting method suffix decoding: holds its parameters; there are no weights."""

    block_bytes = 0
    needs_features = False
    needs_prompts = False

    def __init__(self, config: SpeculativeConfig, target: DraftTarget) -> None:
        self._num_past_outputs = config.suffix_decoding_max_cached_requests
        self._rule = SuffixRule(
            config.suffix_decoding_max_tree_depth,
            config.suffix_decoding_max_spec_factor,
            config.suffix_decoding_min_token_prob,
        )

    def start(self, worker: DrafterWorker) -> SuffixProposer:
        return SuffixProposer(self._rule, self._num_past_outputs, worker.history)


class SuffixProposer(HostProposer):
    """Proposer that searches the sequence and past outputs, and proposes the draft with the highest expected number of
    accepted tokens."""

    def __init__(self, rule: SuffixRule, num_past_outputs: int, history: TokenHistory) -> None:
        self._rule = rule
        self._history = history
        self._num_past_outputs = num_past_outputs
        self._past = PastOutputs(num_past_outputs)
        self._starts = np.zeros(len(history.lengths), dtype=np.int32)  # first output token in the history, by slot

    def start_sequence(self, slot: int) -> None:
        self._starts[slot] = len(self._history.tokens_of(slot))

    def end_sequence(self, slot: int) -> None:
        """Adds the slot's output, without its prompt, to the past outputs."""
        self._past.add(self._history.tokens_of(slot)[self._starts[slot] :])

    def clear_history(self) -> None:
        self._past = PastOutputs(self._num_past_outputs)

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Indexes some past outputs, then searches the requested slots within the step's work limit; None if nothing is
        found."""
        self._past.index()
        return self.search(request, self._best_draft)

    def _best_draft(self, tokens: I32, most: int) -> I32:
        """Returns the best-scored draft of at most `most` tokens after `tokens`; empty if nothing matches."""
        ends = np.flatnonzero(tokens[:-1] == tokens[-1])[-MAX_MATCHES:]
        best = self._continue(tokens, tokens, ends, most)
        for text, places in self._past.places(tokens):
            guess = self._continue(tokens, text, places, most)
            best = guess if guess.score > best.score else best
        return np.array(best.tokens, dtype=np.int32)

    def _continue(self, tokens: I32, text: I32, ends: Places, most: int) -> ScoredDraft:
        """Selects the longest matches among `ends` in `text` and follows them; the draft's length is limited by the
        match's."""
        ends, length = longest_matches(tokens, text, ends, self._rule.max_depth)
        return follow(text, ends, min(most, int(length * self._rule.max_spec_factor)), self._rule.min_token_prob)


def longest_matches(tokens: I32, text: I32, ends: Places, most: int) -> tuple[Places, int]:
    """Selects the `ends` with the longest match before them.

    `ends`: positions in `text` of the last of `tokens`; `most`: tokens compared at most. Returns the positions with the
    longest match, and its length.
    """
    length = min(1, len(ends))
    while 0 < length < min(most, len(tokens)):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length


def follow(text: I32, ends: Places, most: int, min_token_prob: float) -> ScoredDraft:
    """Continues the matches that end at `ends` in `text` by the majority's next token, for at most `most` tokens, while
    the estimated probability of the whole draft is at least `min_token_prob` and no output ends."""
    guess: list[int] = []
    probability, score = 1.0, 0.0
    places = ends + 1
    while len(guess) < most:
        places = places[places < len(text)]
        values, counts = np.unique(text[places], return_counts=True)
        counts[values == BOUNDARY] = 0
        if not counts.any():
            break
        best = int(counts.argmax())
        probability *= float(counts[best] / len(places))
        if probability < min_token_prob:
            break
        guess.append(int(values[best]))
        score += probability
        places = places[text[places] == values[best]] + 1
    return ScoredDraft(guess, score)
