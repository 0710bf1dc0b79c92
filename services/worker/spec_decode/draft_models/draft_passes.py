"""Forward passes of drafters over the blocks of the model's sequences, and which blocks hold what they need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.device.staging import upload
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.spec_decode.trees.token_tree import TokenTree
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.slots import NewBlocks, Rows, SlotTable
from quire.shared.columns import I32


def spread(firsts: I32, counts: I32) -> tuple[Rows, I32]:
    """Of runs of so many consecutive numbers each: the run that each number belongs to, and the numbers."""
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, (firsts[rows] + within).astype(np.int32)


class DraftPasses:
    """Lays out tokens of slots for a forward pass; a drafter's KV lies where the model's does."""

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self._table = table
        self._device = device

    def known(self, slots: Rows, starts: I32, counts: I32, token_ids: I32 | Tensor) -> ForwardBatch:
        """`counts` tokens of each of `slots`, from position `starts` on; what follows the last of each is wanted."""
        rows, positions = spread(starts, counts)
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        several = len(positions) > len(slots)
        attention = self._attention(slots, starts + counts, query_start, max_query_len=int(counts.max()))
        return ForwardBatch(
            token_ids if isinstance(token_ids, Tensor) else self._up(token_ids),
            self._up(positions),
            self._up(self._mapping(slots[rows], positions)),
            attention,
            self._up(query_start[1:] - 1) if several else None,
        )

    def drafts(self, slots: Rows, starts: I32, counts: I32) -> Iterator[ForwardBatch]:
        """One token of each of `slots` after the other, the first at position `starts`: as many passes as the longest
        draft needs. Token ids are left out. A slot with its `counts` tokens done goes on into the null block, as a
        token of position 0: positions behind its last may be some that the model has nothing for."""
        num_turns = int(counts.max(initial=0))
        turns = np.arange(num_turns, dtype=np.int32)[:, None]
        written = turns < counts
        positions = np.where(written, starts + turns, 0)  # [num_turns, num_slots]
        mapping = np.where(written, self._mapping(slots, positions), 0)
        ends = np.where(written, positions + 1, starts + counts)
        query_start = np.arange(len(slots) + 1, dtype=np.int32)
        attention = self._attention(slots, starts + counts, query_start, max_query_len=1)
        at, to, lens = (self._up(array.astype(np.int32, copy=False)) for array in (positions, mapping, ends))
        for turn in range(num_turns):
            yield ForwardBatch(at[turn], at[turn], to[turn], replace(attention, seq_lens=lens[turn]), None)

    def trees(self, tree: TokenTree, slots: Rows, starts: I32) -> Iterator[ForwardBatch]:
        """Of each of `slots` the inner nodes of one depth after the other: their KV lies at places from `starts` on, in
        the order of the tree. Token ids are left out."""
        rows, first = tree.inner_rows, 0
        while first < tree.num_inner:
            depth = rows.depths[1 + first]
            nodes = np.flatnonzero(rows.depths[1:] == depth)
            width, first = len(nodes), int(nodes[-1]) + 1
            places = (starts[:, None] + nodes).ravel().astype(np.int32)
            query_start = np.arange(0, len(places) + 1, width, dtype=np.int32)
            attention = self._attention(slots, starts + first, query_start, max_query_len=width)
            mask = upload(np.tile(tree.inner_masks[nodes], len(slots)), self._device)
            positions = self._up(np.repeat(starts + depth - 1, width))
            to = self._up(self._mapping(np.repeat(slots, width), places))
            yield ForwardBatch(positions, positions, to, replace(attention, tree_mask=mask), None)

    def _attention(self, slots: Rows, seq_lens: I32, query_start: I32, *, max_query_len: int) -> AttentionMetadata:
        longest = int(seq_lens.max())
        width = -(-longest // self._table.block_size)
        tables = self._up(self._table.block_table[slots, :width])
        lens = self._up(seq_lens.astype(np.int32, copy=False))
        return AttentionMetadata(tables, self._up(query_start), lens, max_query_len, longest)

    def _mapping(self, slots: Rows, positions: I32) -> I32:
        blocks, offsets = np.divmod(positions, self._table.block_size)
        mapping: I32 = self._table.block_table[slots, blocks] * self._table.block_size + offsets
        return mapping

    def _up(self, array: npt.NDArray[np.int32]) -> Tensor:
        return upload(array, self._device)


class FilledBlocks:
    """How many positions of each block hold a drafter's KV, from the first one on."""

    def __init__(self, table: SlotTable, num_blocks: int) -> None:
        self._table = table
        self._num_filled = np.zeros(num_blocks, dtype=np.int32)
        self._num_marked = np.zeros(len(table.live), dtype=np.int32)  # full blocks, by slot

    def add_blocks(self, new: NewBlocks) -> None:
        """Blocks start anew, but for those that came with cached content."""
        if len(new.ids):
            cached = -(-self._table.num_cached_tokens[new.slots] // self._table.block_size)
            self._num_filled[new.ids[new.columns >= cached]] = 0

    def copy(self, copies: BlockCopies) -> None:
        """Before the sequences that get the copies begin."""
        self._num_filled[copies.targets] = self._num_filled[copies.sources]

    def start_sequence(self, slot: int) -> int:
        """How many positions of a new sequence are filled, from the first one on."""
        size, num_cached = self._table.block_size, int(self._table.num_cached_tokens[slot])
        if num_cached == 0:
            self._num_marked[slot] = 0
            return 0
        row = self._table.block_table[slot, : -(-num_cached // size)]
        cached = np.minimum(num_cached - size * np.arange(len(row)), size)  # positions of each block
        held = np.minimum(self._num_filled[row], cached)
        if num_cached % size:
            self._num_filled[row[-1]] = held[-1]  # what is behind it was of another sequence
        holes = np.flatnonzero(held < cached)
        num_filled = int(holes[0]) * size + int(held[holes[0]]) if len(holes) else num_cached
        self._num_marked[slot] = num_filled // size
        return num_filled

    def mark(self, slots: Rows, num_filled: I32) -> None:
        """The first so many positions of each of `slots` are filled, with what stays."""
        full, rest = np.divmod(num_filled, self._table.block_size)
        for i in np.flatnonzero(full > self._num_marked[slots]).tolist():
            slot = int(slots[i])
            self._num_filled[self._table.block_table[slot, self._num_marked[slot] : full[i]]] = self._table.block_size
            self._num_marked[slot] = full[i]
        partly = np.flatnonzero(rest)
        last = self._table.block_table[slots[partly], full[partly]]
        self._num_filled[last] = np.maximum(self._num_filled[last], rest[partly])
