"""The known tokens of every slot, on the host."""

from __future__ import annotations

import numpy as np

from services.worker.limits import Limits
from services.worker.slots import Rows
from shared.columns import I32


class TokenHistory:
    """A row for each slot. Memory of rows that are not in use costs nothing until it is written."""

    def __init__(self, limits: Limits) -> None:
        self.tokens = np.zeros((limits.max_num_seqs, limits.max_model_len + 1), dtype=np.int32)
        self.lengths = np.zeros(limits.max_num_seqs, dtype=np.int32)

    def begin(self, slot: int, token_ids: I32) -> None:
        self.tokens[slot, : len(token_ids)] = token_ids
        self.lengths[slot] = len(token_ids)

    def extend(self, slots: Rows, counts: I32, token_ids: I32) -> None:
        """So many tokens more for each of `slots`, slot after slot. What is too long is cut off."""
        lengths, longest = self.lengths[slots], self.tokens.shape[1]
        rows, places = slots, lengths
        if len(token_ids) != len(slots) or (counts != 1).any():
            within = np.arange(len(token_ids)) - np.repeat(np.cumsum(counts) - counts, counts)
            rows, places = np.repeat(slots, counts), np.repeat(lengths, counts) + within
        fits = places < longest
        self.tokens[rows[fits], places[fits]] = token_ids[fits]
        self.lengths[slots] = np.minimum(lengths + counts, longest)

    def of(self, slot: int) -> I32:
        """A view."""
        row: I32 = self.tokens[slot, : self.lengths[slot]]
        return row
