"""Lays out forward passes of drafters over the model's KV blocks, and tracks which blocks hold a drafter's KV."""

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
    """Enumerates runs of consecutive numbers: run i is firsts[i], firsts[i] + 1, ..., counts[i] of them. Returns the
    run index of each number, and the numbers, both [sum of counts]."""
    rows = np.repeat(np.arange(len(counts)), counts)
    within = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, (firsts[rows] + within).astype(np.int32)


class DraftPasses:
    """Builds the batches of a drafter's forward passes from slots and positions; a drafter's KV has the block ids of
    the model's, so that it uses the worker's block table."""

    def __init__(self, table: SlotTable, device: torch.device) -> None:
        self._table = table
        self._device = device

    def known(self, slots: Rows, starts: I32, counts: I32, token_ids: I32 | Tensor) -> ForwardBatch:
        """Returns a pass over `counts` tokens of each of `slots` from position `starts` on, with an output for each
        last token."""
        rows, positions = spread(starts, counts)
        query_start = np.zeros(len(slots) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        several = len(positions) > len(slots)
        attention = self._attention(slots, starts + counts, query_start, max_query_len=int(counts.max()))
        return ForwardBatch(
            token_ids if isinstance(token_ids, Tensor) else self._upload(token_ids),
            self._upload(positions),
            self._upload(self._mapping(slots[rows], positions)),
            attention,
            self._upload(query_start[1:] - 1) if several else None,
        )

    def drafts(self, slots: Rows, starts: I32, counts: I32) -> Iterator[ForwardBatch]:
        """Yields passes of one token per slot at consecutive positions from `starts` on, as many as the longest draft
        needs.

        Token ids are left out. A slot whose `counts` tokens are done continues with position 0 in the null block:
        positions after its last one may lie beyond the model's limits.
        """
        num_steps = int(counts.max(initial=0))
        steps = np.arange(num_steps, dtype=np.int32)[:, None]
        written = steps < counts
        positions = np.where(written, starts + steps, 0)  # [num_steps, num_slots]
        mapping = np.where(written, self._mapping(slots, positions), 0)
        ends = np.where(written, positions + 1, starts + counts)
        query_start = np.arange(len(slots) + 1, dtype=np.int32)
        attention = self._attention(slots, starts + counts, query_start, max_query_len=1)
        at, to, lens = (self._upload(array.astype(np.int32, copy=False)) for array in (positions, mapping, ends))
        for step in range(num_steps):
            yield ForwardBatch(at[step], at[step], to[step], replace(attention, seq_lens=lens[step]), None)

    def trees(self, tree: TokenTree, slots: Rows, starts: I32) -> Iterator[ForwardBatch]:
        """Yields passes over the inner nodes of each depth for each of `slots`; their KV lies at positions from
        `starts` on in the order of the tree. Token ids are left out."""
        rows, first = tree.inner_rows, 0
        while first < tree.num_inner:
            depth = rows.depths[1 + first]
            nodes = np.flatnonzero(rows.depths[1:] == depth)
            width, first = len(nodes), int(nodes[-1]) + 1
            places = (starts[:, None] + nodes).ravel().astype(np.int32)
            query_start = np.arange(0, len(places) + 1, width, dtype=np.int32)
            attention = self._attention(slots, starts + first, query_start, max_query_len=width)
            mask = upload(np.tile(tree.inner_masks[nodes], len(slots)), self._device)
            positions = self._upload(np.repeat(starts + depth - 1, width))
            to = self._upload(self._mapping(np.repeat(slots, width), places))
            yield ForwardBatch(positions, positions, to, replace(attention, tree_mask=mask), None)

    def _attention(self, slots: Rows, seq_lens: I32, query_start: I32, *, max_query_len: int) -> AttentionMetadata:
        """Builds attention metadata for one row per slot: the block tables, cut to the longest sequence, and `seq_lens`
        [num_slots], the tokens of each including those of this pass."""
        longest = int(seq_lens.max())
        width = -(-longest // self._table.block_size)
        tables = self._upload(self._table.block_table[slots, :width])
        lens = self._upload(seq_lens.astype(np.int32, copy=False))
        return AttentionMetadata(tables, self._upload(query_start), lens, max_query_len, longest)

    def _mapping(self, slots: Rows, positions: I32) -> I32:
        """Returns the KV slot (block id * block size + offset) of each position; `slots` and `positions` broadcast."""
        blocks, offsets = np.divmod(positions, self._table.block_size)
        mapping: I32 = self._table.block_table[slots, blocks] * self._table.block_size + offsets
        return mapping

    def _upload(self, array: npt.NDArray[np.int32]) -> Tensor:
        return upload(array, self._device)


class FilledBlocks:
    """Tracks how many leading positions of each block hold a drafter's KV, so that a sequence that shares cached blocks
    knows which ones it must not compute again."""

    def __init__(self, table: SlotTable, num_blocks: int) -> None:
        self._table = table
        self._num_filled = np.zeros(num_blocks, dtype=np.int32)
        self._num_marked = np.zeros(len(table.live), dtype=np.int32)  # full blocks, by slot

    def add_blocks(self, new: NewBlocks) -> None:
        """Resets the counts of newly assigned blocks to 0, except those whose content is cached: another sequence's
        drafter may have filled them."""
        if len(new.ids):
            cached = -(-self._table.num_cached_tokens[new.slots] // self._table.block_size)
            self._num_filled[new.ids[new.columns >= cached]] = 0

    def copy(self, copies: BlockCopies) -> None:
        """Copies the counts of copied blocks, before the sequences that use the copies start."""
        self._num_filled[copies.targets] = self._num_filled[copies.sources]

    def start_sequence(self, slot: int) -> int:
        """Returns how many leading positions of the new sequence of `slot` are filled without a hole, at most its
        cached tokens; 0 if none are cached."""
        size, num_cached = self._table.block_size, int(self._table.num_cached_tokens[slot])
        if num_cached == 0:
            self._num_marked[slot] = 0
            return 0
        row = self._table.block_table[slot, : -(-num_cached // size)]
        cached = np.minimum(num_cached - size * np.arange(len(row)), size)  # positions of each block
        held = np.minimum(self._num_filled[row], cached)
        if num_cached % size:
            self._num_filled[row[-1]] = held[-1]  # the rest was another sequence's
        holes = np.flatnonzero(held < cached)
        num_filled = int(holes[0]) * size + int(held[holes[0]]) if len(holes) else num_cached
        self._num_marked[slot] = num_filled // size
        return num_filled

    def mark(self, slots: Rows, num_filled: I32) -> None:
        """Marks the first `num_filled` positions of each of `slots` as filled; their tokens must be final, not
        drafts."""
        full, rest = np.divmod(num_filled, self._table.block_size)
        for i in np.flatnonzero(full > self._num_marked[slots]).tolist():
            slot = int(slots[i])
            self._num_filled[self._table.block_table[slot, self._num_marked[slot] : full[i]]] = self._table.block_size
            self._num_marked[slot] = full[i]
        partly = np.flatnonzero(rest)
        last = self._table.block_table[slots[partly], full[partly]]
        self._num_filled[last] = np.maximum(self._num_filled[last], rest[partly])
