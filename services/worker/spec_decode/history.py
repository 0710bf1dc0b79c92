"""The known tokens of every slot, on the host."""

from __future__ import annotations

import numpy as np

from services.worker.limits import Limits
from services.worker.slots import Rows
from shared.columns import I32

MOST_PENDING = 64  # steps


class TokenHistory:
    """A row for each slot. Memory of rows that are not in use costs nothing until it is written.

    While nobody drafts nobody reads: steps with a token for each slot are kept as they come, and written down together
    (a step of 256 rows costs 3 µs so, and 18 by itself).
    """

    def __init__(self, limits: Limits) -> None:
        self._tokens = np.zeros((limits.max_num_seqs, limits.max_model_len + 1), dtype=np.int32)
        self._lengths = np.zeros(limits.max_num_seqs, dtype=np.int32)
        self._slots: Rows | None = None  # of the pending steps
        self._pending: list[I32] = []  # a token for each of these

    @property
    def tokens(self) -> I32:
        """[max_num_seqs, width]"""
        self._write_pending()
        return self._tokens

    @property
    def lengths(self) -> I32:
        """[max_num_seqs]"""
        self._write_pending()
        return self._lengths

    def begin(self, slot: int, token_ids: I32) -> None:
        self._write_pending()
        self._tokens[slot, : len(token_ids)] = token_ids
        self._lengths[slot] = len(token_ids)

    def extend_each(self, slots: Rows, token_ids: I32) -> None:
        """The same with a token for each."""
        if self._slots is not slots and not np.array_equal(self._slots, slots):  # type: ignore[arg-type]
            self._write_pending()
            self._slots = slots
        self._pending.append(token_ids)
        if len(self._pending) == MOST_PENDING:
            self._write_pending()

    def extend(self, slots: Rows, counts: I32, token_ids: I32) -> None:
        """So many tokens more for each of `slots`, slot after slot; no token (-1) counts as 0. What is too long is cut
        off."""
        lengths, longest = self.lengths[slots], self._tokens.shape[1]
        within = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, places = np.repeat(slots, counts), np.repeat(lengths, counts) + within
        fits = places < longest
        self._tokens[rows[fits], places[fits]] = np.maximum(token_ids[fits], 0)
        self._lengths[slots] = np.minimum(lengths + counts, longest)

    def of(self, slot: int) -> I32:
        """A view."""
        row: I32 = self.tokens[slot, : self._lengths[slot]]
        return row

    def _write_pending(self) -> None:
        if not self._pending or self._slots is None:
            return
        slots, steps, self._pending = self._slots, np.stack(self._pending), []
        lengths, count = self._lengths[slots], len(steps)
        if int(lengths.max(initial=0)) + count > self._tokens.shape[1]:
            self.extend(slots, np.full(len(slots), count, dtype=np.int32), steps.T.ravel())
            return
        self._tokens[slots, lengths + np.arange(count)[:, None]] = np.maximum(steps, 0)
        self._lengths[slots] = lengths + count
