"""Forward passes of drafters over the blocks of the model's sequences, and which blocks hold what they need."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from services.worker.attention.port import AttentionMetadata, Tensor
from services.worker.forward_batch import ForwardBatch
from services.worker.sampling.component import upload
from services.worker.slots import NewBlocks, Rows, SlotTable
from shared.columns import I32


def spread(firsts: I32, counts: I32) -> tuple[Rows, I32]:
    """Of runs of so many consecutive numbers each: the run that each number belongs to, and the numbers."""
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, (firsts[rows] + within).astype(np.int32)


class Passes:
    """Lays out tokens of slots for a forward pass; a drafter's KV lies where the model's does."""

    def __init__(self, table: SlotTable, device: object) -> None:
        self._table = table
        self._device = device

    def batch(self, slots: Rows, starts: I32, counts: I32, token_ids: Tensor, *, last_only: bool) -> ForwardBatch:
        """`counts` tokens of each of `slots`, from position `starts` on. `last_only`: only the output behind the last
        one of each slot is wanted."""
        size = self._table.block_size
        rows, positions = spread(starts, counts)
        mapping = self._table.block_table[slots[rows], positions // size] * size + positions % size
        seq_lens = (starts + counts).astype(np.int32)
        width = -(-int(seq_lens.max()) // size)
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        attention = AttentionMetadata(
            self._up(np.ascontiguousarray(self._table.block_table[slots, :width])),
            self._up(query_start),
            self._up(seq_lens),
            longest_query=int(counts.max()),
            longest_seq=int(seq_lens.max()),
        )
        wanted = self._up(query_start[1:] - 1) if last_only and len(positions) > len(slots) else None
        return ForwardBatch(token_ids, self._up(positions), self._up(mapping.astype(np.int32)), attention, wanted)

    def _up(self, array: npt.NDArray[np.int32]) -> Tensor:
        return upload(array, self._device)


class FilledBlocks:
    """Which blocks hold a drafter's KV for all their positions."""

    def __init__(self, table: SlotTable, num_blocks: int) -> None:
        self._table = table
        self._filled = np.zeros(num_blocks, dtype=np.bool_)
        self._num_marked = np.zeros(len(table.live), dtype=np.int32)  # by slot

    def hand_out(self, new: NewBlocks) -> None:
        """Blocks start anew, but for those that came with cached content."""
        cached = -(-self._table.num_cached_tokens[new.slots] // self._table.block_size)
        self._filled[new.ids[new.columns >= cached]] = False

    def begin(self, slot: int) -> int:
        """How many positions of a new sequence are filled, from the first one on."""
        size = self._table.block_size
        row = self._table.block_table[slot, : self._table.num_cached_tokens[slot] // size]
        holes = np.flatnonzero(~self._filled[row])
        self._num_marked[slot] = int(holes[0]) if len(holes) else len(row)
        return int(self._num_marked[slot]) * size

    def mark(self, slots: Rows, num_filled: I32) -> None:
        """The first so many positions of each of `slots` are filled, with what stays."""
        full = num_filled // self._table.block_size
        for i in np.flatnonzero(full > self._num_marked[slots]).tolist():
            slot = int(slots[i])
            self._filled[self._table.block_table[slot, self._num_marked[slot] : full[i]]] = True
            self._num_marked[slot] = full[i]
