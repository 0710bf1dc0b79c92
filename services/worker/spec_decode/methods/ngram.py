"""n-gram: what followed when the last tokens occurred before, in the same sequence (prompt lookup)."""

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

MAX_SEARCHED_TOKENS = 2**19  # that are searched at a time, in some 0.3 ms


class Ngram:
    """Nothing to load."""

    block_bytes = 0
    needs_features = False
    needs_prompts = False

    def __init__(self, config: SpeculativeConfig, target: DraftTarget) -> None:
        self._config = config

    def start(self, worker: DrafterWorker) -> NgramProposer:
        return NgramProposer(self._config.shortest_match, self._config.prompt_lookup_max)


class NgramProposer(HostProposer):
    """The longest n-gram of `shortest` to `longest` tokens at the end that occurred before; its earliest occurrence."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, wanted: DraftRequest) -> Drafts | None:
        return self.search(wanted, self._continue) if cpu.unavailable() else self._search_together(wanted)

    def _search_together(self, wanted: DraftRequest) -> Drafts | None:
        """In compiled code: 256 sequences of 600 tokens in 0.1 ms, one by one in 2 to 4."""
        tokens, lengths = wanted.history.tokens, wanted.history.lengths[wanted.slots]
        firsts = np.zeros_like(lengths)  # of what follows; 0: nothing
        groups = _groups(lengths)
        for rows in self.affordable(groups, [int(lengths[rows].sum()) for rows in groups]):
            slots = wanted.slots[rows]
            firsts[rows] = cpu.ends_of_matches(tokens, slots, lengths[rows], self._shortest, self._longest)
        found = np.flatnonzero(firsts)
        if not len(found):
            return None
        slots, firsts = wanted.slots[found], firsts[found]
        counts = np.minimum(wanted.counts[found], lengths[found] - firsts)
        owners, positions = spread(firsts, counts)
        return Drafts(slots, counts, tokens[slots[owners], positions])

    def _continue(self, tokens: I32, most: int) -> I32:
        end = earliest_match(tokens, self._shortest, self._longest)
        return tokens[:0] if end is None else tokens[end : end + most]


def _groups(lengths: I32) -> list[slice]:
    """Rows that are searched at a time."""
    group_of = (np.cumsum(lengths, dtype=np.int64) - lengths) // MAX_SEARCHED_TOKENS
    starts = [0, *(np.flatnonzero(np.diff(group_of)) + 1).tolist()]
    return [slice(*pair) for pair in itertools.pairwise([*starts, len(lengths)])]


def earliest_match(tokens: I32, shortest: int, longest: int) -> int | None:
    """Where the earliest of the longest earlier occurrences of the last `shortest` to `longest` tokens ends."""
    before, last = tokens[:-1], len(tokens) - 1
    ends = np.flatnonzero(before == tokens[-1])  # index of the last token of each occurrence
    for length in range(2, longest + 1):
        if length > shortest and len(ends) <= 1:
            break  # all that are left cannot be told apart any more, or there are none
        longer = ends[ends >= length - 1]
        longer = longer[tokens[longer - (length - 1)] == tokens[last - (length - 1)]] if length <= last else longer[:0]
        if len(longer) == 0 and length > shortest:
            break
        ends = longer
    return int(ends[0]) + 1 if len(ends) else None
