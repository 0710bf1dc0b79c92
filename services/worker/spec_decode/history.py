"""The known tokens of every slot, on the host."""

from __future__ import annotations

import numpy as np

from services.worker.limits import Limits
from services.worker.slots import Rows
from shared.columns import I32

MOST_RECENT = 64  # steps
NOTHING = -2  # no token; -1 is one that could not be sampled


class TokenHistory:
    """A row for each slot. Memory of rows that are not in use costs nothing until it is written.

    While nobody drafts nobody reads: steps with a token for each slot are kept as they come, and written down together.
    256 places far from one another are 5 µs of cache misses in every step otherwise.
    """

    def __init__(self, limits: Limits) -> None:
        self._tokens = np.zeros((limits.max_num_seqs, limits.max_model_len + 1), dtype=np.int32)
        self._lengths = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._recent = np.full((MOST_RECENT, limits.max_num_seqs), NOTHING, dtype=np.int32)  # by step
        self._num_recent = 0  # steps

    @property
    def tokens(self) -> I32:
        """[max_num_seqs, width]"""
        self._write_recent()
        return self._tokens

    @property
    def lengths(self) -> I32:
        """[max_num_seqs]"""
        self._write_recent()
        return self._lengths

    def begin(self, slot: int, token_ids: I32) -> None:
        self._recent[: self._num_recent, slot] = NOTHING
        self._tokens[slot, : len(token_ids)] = token_ids
        self._lengths[slot] = len(token_ids)

    def extend_each(self, slots: Rows, token_ids: I32) -> None:
        """A token more for each of `slots`."""
        self._recent[self._num_recent, slots] = token_ids
        self._num_recent += 1
        if self._num_recent == MOST_RECENT:
            self._write_recent()

    def extend(self, slots: Rows, counts: I32, token_ids: I32) -> None:
        """So many tokens more for each of `slots`, slot after slot; no token (-1) counts as 0. What is too long is cut
        off."""
        self._write_recent()
        self._append(slots, counts, token_ids)

    def of(self, slot: int) -> I32:
        """A view."""
        recent = self._recent[: self._num_recent, slot]
        token_ids = recent[recent != NOTHING]
        if len(token_ids):
            recent[:] = NOTHING
            row, start = self._tokens[slot], int(self._lengths[slot])
            end = min(start + len(token_ids), len(row))
            row[start:end] = np.maximum(token_ids[: end - start], 0)
            self._lengths[slot] = end
        known: I32 = self._tokens[slot, : self._lengths[slot]]
        return known

    def _write_recent(self) -> None:
        if not self._num_recent:
            return
        recent, self._num_recent = self._recent[: self._num_recent], 0
        there = recent != NOTHING
        always = there.all(axis=0)
        slots = np.flatnonzero(always)
        self._append_to_all(slots, recent[:, slots])
        others = np.flatnonzero(there.any(axis=0) & ~always)
        if len(others):
            which = there[:, others]
            self._append(others, which.sum(axis=0, dtype=np.int32), recent[:, others].T[which.T])
        recent[:] = NOTHING

    def _append_to_all(self, slots: Rows, steps: I32) -> None:
        """`steps`: [num_steps, num_slots] a token of each in each."""
        lengths, count = self._lengths[slots], len(steps)
        if int(lengths.max(initial=0)) + count > self._tokens.shape[1]:
            self._append(slots, np.full(len(slots), count, dtype=np.int32), steps.T.ravel())
            return
        self._tokens[slots, lengths + np.arange(count)[:, None]] = np.maximum(steps, 0)
        self._lengths[slots] = lengths + count

    def _append(self, slots: Rows, counts: I32, token_ids: I32) -> None:
        lengths, longest = self._lengths[slots], self._tokens.shape[1]
        within = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, places = np.repeat(slots, counts), np.repeat(lengths, counts) + within
        fits = places < longest
        self._tokens[rows[fits], places[fits]] = np.maximum(token_ids[fits], 0)
        self._lengths[slots] = np.minimum(lengths + counts, longest)
