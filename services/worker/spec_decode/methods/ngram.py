"""n-gram: drafts what followed an earlier occurrence of the last tokens in the same sequence (prompt lookup)."""

from __future__ import annotations

import itertools

import numpy as np

from quire.kernels import cpu
from quire.services.worker.spec_decode.config import SpeculativeConfig
from quire.services.worker.spec_decode.draft_models.draft_passes import spread
from quire.services.worker.spec_decode.drafter import DrafterWorker, DraftTarget
from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer
from quire.services.worker.step.drafts.drafts import Drafts
from quire.shared.columns import I32

MAX_SEARCHED_TOKENS = 2**19  # per batched search, which takes some 0.3 ms


class Ngram:
    """Drafting method n-gram: holds the parameters of the search; there are no weights."""

    block_bytes = 0
    needs_features = False
    needs_prompts = False

    def __init__(self, config: SpeculativeConfig, target: DraftTarget) -> None:
        self._config = config

    def start(self, worker: DrafterWorker) -> NgramProposer:
        return NgramProposer(self._config.shortest_match, self._config.prompt_lookup_max)


class NgramProposer(HostProposer):
    """Proposer that continues the earliest occurrence of the longest n-gram, of `shortest` to `longest` tokens, that
    ends the sequence."""

    def __init__(
        self, shortest: int, longest: int, *, max_searched_tokens: int = MAX_SEARCHED_TOKENS, is_compiled: bool = True
    ) -> None:
        """`max_searched_tokens`: of one batched search; `is_compiled`: compiled code searches if that is built."""
        self._shortest, self._longest = shortest, longest
        self._max_searched_tokens = max_searched_tokens
        self._is_compiled = is_compiled and not cpu.unavailable()

    def propose(self, request: DraftRequest) -> Drafts | None:
        """Searches the requested slots' own tokens, in compiled code if that is built; returns None if nothing matched.
        Slots beyond the step's work limit come first in the next step."""
        return self._search_together(request) if self._is_compiled else self.search(request, self._continue)

    def _search_together(self, request: DraftRequest) -> Drafts | None:
        """Searches batches of slots in compiled code: 256 sequences of 600 tokens in 0.1 ms, against 2 to 4 ms one by
        one."""
        tokens, lengths = request.history.tokens, request.history.lengths[request.slots]
        firsts = np.zeros_like(lengths)  # first token to draft, by slot; 0: no match
        groups = _groups(lengths, self._max_searched_tokens)
        for rows in self.affordable(groups, [int(lengths[rows].sum()) for rows in groups]):
            slots = request.slots[rows]
            firsts[rows] = cpu.ends_of_matches(tokens, slots, lengths[rows], self._shortest, self._longest)
        matched = np.flatnonzero(firsts)
        if not len(matched):
            return None
        slots, firsts = request.slots[matched], firsts[matched]
        counts = np.minimum(request.counts[matched], lengths[matched] - firsts)
        owners, positions = spread(firsts, counts)
        return Drafts(slots, counts, tokens[slots[owners], positions])

    def _continue(self, tokens: I32, most: int) -> I32:
        """Returns up to `most` tokens that followed the match in `tokens`, none if there is no match."""
        end = earliest_match(tokens, self._shortest, self._longest)
        return tokens[:0] if end is None else tokens[end : end + most]


def _groups(lengths: I32, max_tokens: int) -> list[slice]:
    """Splits the rows into consecutive slices of about `max_tokens` tokens each, by their `lengths`; no row is
    split."""
    group_of = (np.cumsum(lengths, dtype=np.int64) - lengths) // max_tokens
    starts = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist()]
    return [slice(*pair) for pair in itertools.pairwise([*starts, len(lengths)])]


def earliest_match(tokens: I32, shortest: int, longest: int) -> int | None:
    """Returns the index after the earliest among the longest earlier occurrences of the last `shortest` to `longest`
    tokens, None if there is none; the draft begins at this index."""
    before, last = tokens[:-1], len(tokens) - 1
    ends = np.flatnonzero(before == tokens[-1])  # index of the last token of each occurrence
    for length in range(2, longest + 1):
        if length > shortest and len(ends) <= 1:
            break  # a longer match cannot change the result
        longer = ends[ends >= length - 1]
        longer = longer[tokens[longer - (length - 1)] == tokens[last - (length - 1)]] if length <= last else longer[:0]
        if len(longer) == 0 and length > shortest:
            break
        ends = longer
    return int(ends[0]) + 1 if len(ends) else None
