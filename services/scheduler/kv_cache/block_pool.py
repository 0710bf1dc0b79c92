"""KV blocks of one worker: reference counts, the free list, and the index from prefix hashes to blocks.

Block 0 is the null block: never allocated, never counted. A free block keeps its content and can be hit until it is
allocated again; the free list is therefore the LRU order of eviction.

Sequences that compute the same tokens at the same time fill equal blocks. The first of them is the one that the index
finds; the others are twins, one of which replaces it when it is allocated. A twin without an owner has no use.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from quire.services.scheduler.kv_cache.free_list import FreeList
from quire.services.scheduler.kv_cache.part_index import PartIndex

NULL_BLOCK = 0
PARTIAL_BLOCK = b""  # instead of a hash: the block is partially filled


@dataclass(frozen=True, slots=True)
class BlockUse:
    """Block counts: total = free + cached + used, without the null block."""

    total: int
    free: int
    cached: int
    used: int


class Observer(Protocol):
    """Receives the changes of the set of cached hashes."""

    def store(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None: ...


class BlockPool:
    """Owns every block id of a worker. A block without references is free."""

    def __init__(self, num_blocks: int, observer: Observer | None = None, parts: PartIndex | None = None) -> None:
        """Creates a pool whose blocks are all free and without content. `num_blocks`: null block included;
        `observer`: receives changes of the cached hashes; `parts`: None if only whole blocks are reused."""
        assert num_blocks >= 2, "at least one block besides the null block"
        self.num_blocks = num_blocks
        self._free = FreeList(num_blocks, range(1, num_blocks))
        self._references = array("i", [0]) * num_blocks
        self.references_of = np.frombuffer(
            self._references, dtype=np.intc
        )  # [num_blocks] read-only view of the same memory
        self._forgotten_at = array("q", [0]) * num_blocks
        self.forgotten_at = np.frombuffer(
            self._forgotten_at, dtype=np.int64
        )  # [num_blocks] value of num_forgotten when the block was last evicted
        self.num_forgotten = 0  # number of evictions so far
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.find: Callable[[bytes], int | None] = self._block_of.get  # called for each block of each prompt
        self._twins: dict[bytes, dict[int, None]] = {}  # by hash: blocks with the same content as the one that is found
        self._twin_hash: dict[int, bytes] = {}
        self._observer = observer
        self._parts = parts
        self._num_cached_free = 0
        self.num_shared = 0  # references beyond the first: blocks saved by sharing

    @property
    def num_free(self) -> int:
        """Number of blocks that can be allocated, cached ones included."""
        return len(self._free)

    @property
    def use(self) -> BlockUse:
        total, available = self.num_blocks - 1, len(self._free)
        cached = self._num_cached_free
        return BlockUse(total, available - cached, cached, total - available)

    @property
    def free_order(self) -> list[int]:
        return list(self._free)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a lookup may have another result."""
        return self.num_forgotten, len(self._block_of)

    def references(self, block: int) -> int:
        return self._references[block]

    def hash_of(self, block: int) -> bytes | None:
        """Returns the hash of a block's content; PARTIAL_BLOCK if it is partially filled, None if it cannot be
        found."""
        return self._hash_of[block]

    def is_known(self, block: int) -> bool:
        """Returns whether the hash of the block's whole content is recorded."""
        return bool(self._hash_of[block]) or block in self._twin_hash

    def allocate(self, count: int) -> list[int]:
        """Allocates `count` blocks with one reference each, least recently used first, and evicts the content that
        they hold. Raises IndexError if fewer are free."""
        blocks = self._free.popleft_n(count)
        references, hash_of = self._references, self._hash_of
        for block in blocks:
            references[block] = 1
        cached = [block for block in blocks if hash_of[block] is not None]
        if cached:
            self._num_cached_free -= len(cached)
            self._evict(cached)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Adds a reference to each block; a free block leaves the free list and keeps its content."""
        for block in blocks:
            if self._references[block] == 0:
                self._free.remove(block)
                self._num_cached_free -= self._hash_of[block] is not None
            else:
                self.num_shared += 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drops one reference to each block, in the given order; a sequence releases its blocks last to first, so that
        the tail of a prefix is evicted before its head. Blocks without a known prefix are allocated again first."""
        references, hash_of, twin_hash = self._references, self._hash_of, self._twin_hash
        cached = []
        for block in blocks:
            references[block] = remaining = references[block] - 1
            if remaining:
                self.num_shared -= 1
                continue
            if block in twin_hash:
                self._drop_twin(block)
                if self._parts is not None:
                    self._parts.remove(block)
            if hash_of[block] is None:
                self._free.prepend(block)
            else:
                cached.append(block)
        self._free.extend(cached)
        self._num_cached_free += len(cached)

    def record_hash(self, block: int, block_hash: bytes) -> None:
        """Records the content of an owned block. If another block has the same content, that one remains the one that
        is found."""
        self.record_hash_each((block,), (block_hash,))

    def record_hash_each(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Records the content of each owned block, as record_hash() does, and reports newly cached hashes to the
        observer."""
        references, block_of, hash_of, observer = self._references, self._block_of, self._hash_of, self._observer
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            assert references[block] > 0, "a free block cannot gain content"
            if block_hash in block_of:
                self._add_twin(block, block_hash)
                continue
            block_of[block_hash] = block
            hash_of[block] = block_hash
            if observer is not None:
                observer.store(block_hash)

    def record_part(self, block: int, content: bytes) -> None:
        """Records the content of an owned, partially filled block in the part index; requires that partial blocks
        are reused."""
        assert self._parts is not None, "parts are to be found again"
        assert self._references[block] > 0, "a free block cannot gain content"
        if self._hash_of[block] is None:
            self._hash_of[block] = PARTIAL_BLOCK
        self._parts.note(block, content)

    def adopt(self, block: int, block_hash: bytes) -> None:
        """Records the content of a free block that the worker kept while the scheduler was away, and reports it to
        the observer. Does nothing if another block has this hash or this block has content already."""
        assert self._references[block] == 0, "adopted before anything runs"
        if block_hash not in self._block_of and self._hash_of[block] is None:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash
            if self._observer is not None:
                self._observer.store(block_hash)
            self._free.remove(block)
            self._free.append(block)
            self._num_cached_free += 1

    def clear(self) -> int:
        """Drops every cached prefix; only valid while no block is owned. Returns the number of blocks that held one."""
        assert len(self._free) == self.num_blocks - 1, "blocks are in use"
        held = [block for block, block_hash in enumerate(self._hash_of) if block_hash is not None]
        self._evict(held)
        self._num_cached_free = 0
        return len(held)

    @property
    def cached_hashes(self) -> Iterable[bytes]:
        """Hashes of everything that can be hit now."""
        return self._block_of.keys()

    def _evict(self, blocks: Iterable[int]) -> None:
        """Removes blocks with content from the index and reports the hashes to the observer; a twin with the same
        content, if there is one, takes over the hash instead."""
        hash_of, block_of, forgotten_at = self._hash_of, self._block_of, self._forgotten_at
        twins, parts, observer = self._twins, self._parts, self._observer
        self.num_forgotten = now = self.num_forgotten + 1
        for block in blocks:
            block_hash = hash_of[block]
            assert block_hash is not None
            hash_of[block] = None
            forgotten_at[block] = now
            if parts is not None:
                parts.remove(block)
            if block_hash in twins:
                self._promote(next(iter(twins[block_hash])), block_hash)
            elif block_hash != PARTIAL_BLOCK:
                del block_of[block_hash]
                if observer is not None:
                    observer.remove(block_hash)

    def _add_twin(self, block: int, block_hash: bytes) -> None:
        """Records that `block` has the same content as the block that is found under `block_hash`, and replaces it
        once that one is evicted."""
        if self._hash_of[block] == PARTIAL_BLOCK:
            self._evict((block,))
        self._twins.setdefault(block_hash, {})[block] = None
        self._twin_hash[block] = block_hash

    def _promote(self, twin: int, block_hash: bytes) -> None:
        self._drop_twin(twin)
        self._block_of[block_hash] = twin
        self._hash_of[twin] = block_hash

    def _drop_twin(self, block: int) -> None:
        """Removes a block from the twins of its hash."""
        block_hash = self._twin_hash.pop(block)
        twins = self._twins[block_hash]
        del twins[block]
        if not twins:
            del self._twins[block_hash]
