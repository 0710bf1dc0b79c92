"""Block tables of the running sequences: match a prefix, grow, slide, release.

A table is a list of block positions; each has one block per KV group, in the order of the groups (groups.py). The null
block replaces a block that a window has slid past: that block may belong to another sequence already.

A slot's blocks are not allocated to another sequence while a step in flight names the slot: releasing them with a fence
keeps them owned until that step has returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.kv_cache.block_pool import NULL_BLOCK, BlockPool, BlockUse, Observer
from quire.services.scheduler.kv_cache.cross_blocks import CrossBlocks
from quire.services.scheduler.kv_cache.groups import BlockArray, KVGroups
from quire.services.scheduler.kv_cache.match import Match, MultiGroupMatch, SingleGroupMatch
from quire.services.scheduler.kv_cache.part_index import PARENT_BYTES, TOKEN_BYTES, BlockPart, PartIndex
from quire.shared.kv.block_hash import page_name
from quire.shared.kv.kv_retention import StateRetention


class KVCacheManager:
    """Sole allocator of a worker's blocks. free + cached + used == total at all times; fenced blocks count as used."""

    def __init__(
        self,
        num_blocks: int,
        groups: KVGroups,
        num_slots: int,
        enable_caching: bool = True,
        *,
        observer: Observer | None = None,
        prefix_grain: int = 0,
    ) -> None:
        """`prefix_grain`: minimum number of cached tokens that are worth copying a partial block; 0, or a whole block
        or more: only whole blocks are reused."""
        self.groups, self.num_groups = groups, groups.num
        self._plain, self._has_windows, self._keeps_nothing = groups.plain, groups.has_windows, groups.keep_nothing
        self.block_size = block_size = groups.block_size
        self.enable_caching = enable_caching and not self._keeps_nothing
        has_parts = enable_caching and 0 < prefix_grain < block_size and groups.plain
        self.parts = PartIndex(block_size, prefix_grain) if has_parts else None
        self.pool = BlockPool(num_blocks, observer, self.parts)
        self.cross = CrossBlocks(self.pool, groups.num, block_size, num_slots) if groups.cross_length else None
        self._pinned: list[int] = []
        self._tables: list[list[int]] = [[] for _ in range(num_slots)]
        self.num_hashed = np.zeros(
            num_slots, dtype=np.int32
        )  # [num_slots] leading blocks of each table whose hashes are recorded
        self._fenced: deque[tuple[int, Sequence[int]]] = deque()  # (step id, blocks), step ids ascending
        self.num_fenced = 0
        self._held: dict[int, Sequence[int]] = {}  # blocks held by each transfer
        self._filled: list[tuple[int, bytes]] | None = None  # newly recorded blocks; None: not tracked
        self._worth: dict[
            int, tuple[Container[int], ...]
        ] = {}  # block positions worth storing by slot and group, see set_restart_points()
        self._worth_without_ends: tuple[Container[int], ...] = ()
        self._num_slid = {
            window: np.zeros(num_slots, dtype=np.int32) for window in groups.windows
        }  # [num_slots] positions slid past

    @property
    def use(self) -> BlockUse:
        return self.pool.use

    def table(self, slot: int) -> Sequence[int]:
        return self._tables[slot]

    @property
    def num_free(self) -> int:
        """Number of block positions that can be allocated, cached ones included."""
        return self.pool.num_free // self.num_groups

    def blocks_for(self, num_tokens: int) -> int:
        """Returns the number of block positions for `num_tokens` tokens."""
        return 0 if self._keeps_nothing else -(-num_tokens // self.block_size)

    def match(self, block_hashes: Sequence[bytes]) -> Match:
        """Returns the blocks of the longest cached prefix of a hash chain. Changes nothing."""
        hashes = block_hashes if self.enable_caching else ()
        return SingleGroupMatch(self.pool, hashes) if self._plain else MultiGroupMatch(self.pool, self.groups, hashes)

    def has_needed_blocks(self, slot: int, num_computed: int) -> bool:
        """Returns whether the slot has every block that a sequence with `num_computed` computed tokens reads."""
        slid = self._num_slid
        return not slid or all(int(slid[window][slot]) <= window.first_kept(num_computed) for window in slid)

    def match_part(self, content: bytes) -> BlockPart | None:
        """Returns the partial match of `content`, which is not cached as a whole block. Changes nothing."""
        return None if self.parts is None else self.parts.find(content)

    def pin(self, block: int) -> None:
        """Prevents the allocation of an unowned block until unpin(); does nothing for a block with references."""
        if self.pool.references(block) == 0:
            self.pool.share([block])
            self._pinned.append(block)

    def unpin(self) -> None:
        if self._pinned:
            self.pool.release(self._pinned)
            self._pinned.clear()

    def admit(self, slot: int, hits: list[int], num_whole: int | None = None) -> None:
        """Starts the table of a free slot with shared blocks; the first `num_whole` of them are full, by default
        all."""
        assert not self._tables[slot], f"slot {slot} still has blocks"
        if hits:
            self.pool.share(self._without_null(hits))
        self._begin(slot, hits, len(hits) // self.num_groups if num_whole is None else num_whole)

    def rebase(self, slot: int, blocks: list[int]) -> None:
        """Replaces the slot's table by shared blocks. No step in flight may name the slot."""
        self.pool.share(self._without_null(blocks))
        worth = self._worth.get(slot)
        self.pool.release(self._take_table(slot))  # the blocks of encoder outputs stay
        if worth is not None:  # the slot keeps its sequence
            self._worth[slot] = worth
        self._begin(slot, blocks, len(blocks) // self.num_groups)

    def _begin(self, slot: int, blocks: list[int], num_hashed: int) -> None:
        """Stores the slot's table, whose first `num_hashed` positions have recorded hashes, and derives how far each
        window has slid from the leading null blocks."""
        self._tables[slot] = list(blocks)
        self.num_hashed[slot] = num_hashed
        if not self._has_windows:
            return
        for window, (group, *_) in self.groups.windows.items():
            group_blocks = blocks[group :: self.num_groups]
            self._num_slid[window][slot] = next((i for i, block in enumerate(group_blocks) if block), len(group_blocks))

    def _without_null(self, blocks: Sequence[int]) -> Sequence[int]:
        """Returns the blocks without null blocks."""
        return [block for block in blocks if block] if self._has_windows else blocks

    def grow(self, slot: int, num_tokens: int) -> list[int] | None:
        """Allocates blocks so that `slot` has room for `num_tokens` tokens, possibly none; returns the new ones, or
        None, with nothing changed, if there are too few."""
        table = self._tables[slot]
        missing = self.blocks_for(num_tokens) * self.num_groups - len(table)
        if missing <= 0:
            return []
        if missing > self.pool.num_free:
            return None
        blocks = self.pool.allocate(missing)
        table += blocks
        return blocks

    def allocate(self, slot: int, count: int) -> list[int]:
        """Allocates `count` block positions for `slot` and returns their blocks, one per KV group and position; the
        caller has checked that there are enough blocks."""
        blocks = self.pool.allocate(count * self.num_groups)
        self._tables[slot] += blocks
        return blocks

    def append_each(self, slots: Sequence[int]) -> list[list[int]]:
        """Allocates one block position for each of `slots`; there are enough blocks. Returns the blocks of each
        slot."""
        size, tables = self.num_groups, self._tables
        blocks = self.pool.allocate(len(slots) * size)
        if size == 1:
            for slot, block in zip(slots, blocks, strict=True):
                tables[slot].append(block)
            return [[block] for block in blocks]
        gains = [blocks[start : start + size] for start in range(0, len(blocks), size)]
        for slot, gain in zip(slots, gains, strict=True):
            tables[slot] += gain
        return gains

    def slide(self, num_computed: BlockArray, live: npt.NDArray[np.bool_]) -> None:
        """Frees the blocks that no step reads any more once `num_computed` tokens of each slot are computed.

        Steps in flight still read them, but everything planned from now on runs after those steps, so no fence is
        needed.
        """
        for window, groups in self.groups.windows.items():
            slid = self._num_slid[window]
            first = np.maximum(num_computed - (window.length - 1), 0) // self.block_size
            if self.enable_caching and isinstance(window, StateRetention):
                first = np.minimum(
                    first, self.num_hashed
                )  # its tokens may be known only steps later; until then its hash is not recorded
            for slot in (live & (first > slid)).nonzero()[0].tolist():
                begin, end = int(slid[slot]), min(int(first[slot]), len(self._tables[slot]) // self.num_groups)
                self._slide(self._tables[slot], groups, begin, end)
                slid[slot] = end

    def _slide(self, table: list[int], groups: Sequence[int], begin: int, end: int) -> None:
        """Releases the blocks of `groups` at block positions [begin, end) of a table and replaces them by the null
        block."""
        size = self.num_groups
        places = [block * size + group for block in range(begin, end) for group in groups]
        self.pool.release([table[place] for place in places if table[place]])
        for place in places:
            table[place] = NULL_BLOCK

    def record_hashes(self, slot: int, block_hashes: Sequence[bytes], first: int | None = None) -> None:
        """Records the content of the next blocks of the table, which planned steps fill. `first`: index of the first of
        them, if the caller has read num_hashed."""
        start = int(self.num_hashed[slot]) if first is None else first
        end = start + len(block_hashes)
        table = self._tables[slot]
        if self._plain:
            named = table[start:end]
            self.pool.record_hash_each(named, block_hashes)
            if self._filled is not None:
                self._filled += zip(named, block_hashes, strict=True)
        else:
            self._name_groups(slot, start, block_hashes)
        self.num_hashed[slot] = end

    def _name_groups(self, slot: int, start: int, block_hashes: Sequence[bytes]) -> None:
        """Records the page name of every block at positions from `start` on, for several KV groups; null blocks are
        skipped. Pages worth storing in a lower tier are collected for take_filled()."""
        size, table, filled = self.num_groups, self._tables[slot], self._filled
        worth = self._worth.get(slot, self._worth_without_ends)
        for position, block_hash in enumerate(block_hashes, start):
            for group, block in enumerate(table[position * size : (position + 1) * size]):
                if not block:
                    continue  # the window has slid past it
                name = page_name(block_hash, group)
                self.pool.record_hash(block, name)
                if filled is not None and position in worth[group]:
                    filled.append((block, name))

    def record_full_blocks(self, slot: int, contents: Sequence[bytes]) -> None:
        """Notes the contents of the last len(contents) blocks with recorded hashes of `slot` in the part index."""
        assert self.parts is not None
        end = int(self.num_hashed[slot])
        for block, content in zip(self._tables[slot][end - len(contents) : end], contents, strict=True):
            assert self.pool.is_known(block)
            self.parts.note(block, content)

    def record_part(self, slot: int, content: bytes) -> None:
        """Records the content of the block after the recorded ones, unless another block holds as much of it."""
        assert self.parts is not None
        found = self.parts.find(content)
        block = self._tables[slot][self.num_hashed[slot]]
        if found is None or found.block == block or found.num_tokens * TOKEN_BYTES < len(content) - PARENT_BYTES:
            self.pool.record_part(block, content)

    def release(self, slot: int, fence: int | None) -> None:
        """Empties the slot's table and releases its blocks, last to first, once the step `fence` has returned (None:
        at once)."""
        blocks = self._take_table(slot)
        if self.cross is not None:
            blocks = [*blocks, *self.cross.clear_slot(slot)]
        if fence is None:
            self.pool.release(blocks)
        elif blocks:
            self._fenced.append((fence, blocks))
            self.num_fenced += len(blocks)

    def _take_table(self, slot: int) -> Sequence[int]:
        """Empties the slot's table; returns its blocks, last to first."""
        blocks = self._without_null(self._tables[slot][::-1])
        self._tables[slot] = []
        self.num_hashed[slot] = 0
        self._worth.pop(slot, None)
        return blocks

    def pass_fence(self, step_id: int) -> None:
        """Releases the blocks whose fence is `step_id` or an earlier step, as all steps up to it have returned."""
        while self._fenced and self._fenced[0][0] <= step_id:
            _, blocks = self._fenced.popleft()
            self.num_fenced -= len(blocks)
            self.pool.release(blocks)

    def track_filled(self) -> None:
        """Starts collecting newly recorded blocks for take_filled()."""
        self._filled = []
        self._worth_without_ends = self.groups.pages_read_from(())

    def set_restart_points(self, slot: int, ends: Iterable[int]) -> None:
        """Sets the numbers of leading blocks after which other sequences may start: take_filled() returns only those
        pages of windows that such starts need."""
        if self._filled is not None and self._has_windows:
            self._worth[slot] = self.groups.pages_read_from(ends)

    def take_filled(self) -> list[tuple[int, bytes]]:
        """Returns and clears the blocks recorded since the last call, with their hashes."""
        assert self._filled is not None, "track_filled() was called"
        filled, self._filled = self._filled, []
        return filled

    def hold_blocks(self, transfer_id: int, blocks: Sequence[int]) -> None:
        """Keeps blocks unchanged until release_held()."""
        self.pool.share(blocks)
        self._held[transfer_id] = [*self._held.get(transfer_id, ()), *blocks]

    def allocate_for(self, transfer_id: int, count: int) -> list[int]:
        """Allocates `count` blocks that the transfer fills, and holds them until release_held(); the caller has
        checked that there are enough."""
        blocks = self.pool.allocate(count)
        self._held[transfer_id] = [*self._held.get(transfer_id, ()), *blocks]
        return blocks

    def release_held(self, transfer_id: int) -> None:
        self.pool.release(self._held.pop(transfer_id)[::-1])

    @property
    def num_held(self) -> int:
        """Number of block references of transfers."""
        return sum(map(len, self._held.values())) if self._held else 0

    def num_unowned(self) -> int:
        """Number of used blocks without a table, fence or transfer that owns them: 0, or there is a leak. Walks all
        tables."""
        owned = {block for table in self._tables for block in table if block}
        owned.update(() if self.cross is None else self.cross.owned())
        owned.update(block for _, blocks in self._fenced for block in blocks)
        owned.update(block for blocks in self._held.values() for block in blocks)
        return self.use.used - len(owned)

    @property
    def idle(self) -> bool:
        """Whether no block is owned."""
        return self.pool.num_free == self.pool.num_blocks - 1

    def reset(self) -> int:
        """Drops all cached prefixes; only valid when idle. Returns the number of blocks that held one."""
        return self.pool.clear()
