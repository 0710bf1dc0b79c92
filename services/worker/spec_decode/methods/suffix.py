"""Suffix decoding: what followed the longest match, in the same sequence or in past outputs (arXiv 2411.04975).

The longer the match, the longer the draft; it goes on while what followed the matches says clearly enough how.
Frequencies are those of a suffix tree, but no tree is kept: matches are found by comparing backwards from the places
where the last tokens occurred, and are followed forward from there.
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
    """How far to look back and ahead."""

    max_depth: int
    max_spec_factor: float
    min_token_prob: float


@dataclass(frozen=True, slots=True)
class ScoredDraft:
    """A draft, and how many of its tokens can be expected to be right."""

    tokens: list[int]
    score: float


class Suffix:
    """Nothing to load."""

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
    """Looks into the sequence and into past outputs, and takes the guess of which more is expected."""

    def __init__(self, rule: SuffixRule, num_past_outputs: int, history: TokenHistory) -> None:
        self._rule = rule
        self._history = history
        self._num_past_outputs = num_past_outputs
        self._past = PastOutputs(num_past_outputs)
        self._starts = np.zeros(len(history.lengths), dtype=np.int32)  # where outputs begin in the history

    def start_sequence(self, slot: int) -> None:
        self._starts[slot] = len(self._history.tokens_of(slot))

    def end_sequence(self, slot: int) -> None:
        self._past.add(self._history.tokens_of(slot)[self._starts[slot] :])

    def clear_history(self) -> None:
        self._past = PastOutputs(self._num_past_outputs)

    def propose(self, wanted: DraftRequest) -> Drafts | None:
        self._past.index()
        return self.search(wanted, self._best_draft)

    def _best_draft(self, tokens: I32, most: int) -> I32:
        here = np.flatnonzero(tokens[:-1] == tokens[-1])[-MAX_MATCHES:]
        best = self._continue(tokens, tokens, here, most)
        for text, places in self._past.places(tokens):
            guess = self._continue(tokens, text, places, most)
            best = guess if guess.score > best.score else best
        return np.array(best.tokens, dtype=np.int32)

    def _continue(self, tokens: I32, text: I32, ends: Places, most: int) -> ScoredDraft:
        ends, length = longest_matches(tokens, text, ends, self._rule.max_depth)
        return follow(text, ends, min(most, int(length * self._rule.max_spec_factor)), self._rule.min_token_prob)


def longest_matches(tokens: I32, text: I32, ends: Places, most: int) -> tuple[Places, int]:
    """Of `ends`, places in `text` where the last of `tokens` stands, those before which most of the rest stands too, up
    to `most` tokens in all; and how many tokens these are."""
    length = min(1, len(ends))
    while 0 < length < min(most, len(tokens)):
        longer = ends[ends >= length]
        longer = longer[text[longer - length] == tokens[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    return ends, length


def follow(text: I32, ends: Places, most: int, min_token_prob: float) -> ScoredDraft:
    """Goes on as most of the matches that `ends` ends do, while that is likely enough."""
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
