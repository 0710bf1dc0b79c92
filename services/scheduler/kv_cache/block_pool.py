"""The blocks of one worker: reference counts, the free list, and which block holds which prefix.

Block 0 is the null block: never handed out, never counted. A free block keeps its content, and can be hit, until it is
taken again; the free list is therefore the LRU order of eviction.

Sequences that compute the same at the same time fill equal blocks. The first of them is the one that is found; the
others are twins, of which one takes its place when it is taken. A twin that nobody owns is of no use.
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
PARTIAL_BLOCK = b""  # in place of a hash: the block holds the beginning of one


@dataclass(frozen=True, slots=True)
class BlockUse:
    """total = free + cached + used, the null block left out."""

    total: int
    free: int
    cached: int
    used: int


class Observer(Protocol):
    """Told what the cache holds, hash by hash."""

    def store(self, block_hash: bytes) -> None: ...

    def remove(self, block_hash: bytes) -> None: ...


class BlockPool:
    """Owns every block id of a worker. A block is free when nobody refers to it."""

    def __init__(self, num_blocks: int, observer: Observer | None = None, parts: PartIndex | None = None) -> None:
        """`parts`: None if only whole blocks are found again."""
        assert num_blocks >= 2, "one block beside the null block"
        self.num_blocks = num_blocks
        self._free = FreeList(num_blocks, range(1, num_blocks))
        self._references = array("i", [0]) * num_blocks
        self.references_of = np.frombuffer(self._references, dtype=np.intc)  # [num_blocks] the same, to be read
        self._forgotten_at = array("q", [0]) * num_blocks
        self.forgotten_at = np.frombuffer(self._forgotten_at, dtype=np.int64)  # [num_blocks] what num_forgotten became
        self.num_forgotten = 0  # times that blocks were given other content
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self.find: Callable[[bytes], int | None] = self._block_of.get  # asked for each block of each prompt
        self._twins: dict[bytes, dict[int, None]] = {}  # by hash: blocks that hold what another is found for
        self._twin_hash: dict[int, bytes] = {}
        self._observer = observer
        self._parts = parts
        self._num_cached_free = 0
        self.num_shared = 0  # references beyond the first: blocks that sharing saves

    @property
    def num_free(self) -> int:
        """Blocks that can be taken, cached ones included."""
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
        """Another one whenever something else can be found."""
        return self.num_forgotten, len(self._block_of)

    def references(self, block: int) -> int:
        return self._references[block]

    def hash_of(self, block: int) -> bytes | None:
        """PARTIAL_BLOCK if it is not filled; None if it holds nothing that could be found."""
        return self._hash_of[block]

    def is_known(self, block: int) -> bool:
        """Whether its whole content is on record."""
        return bool(self._hash_of[block]) or block in self._twin_hash

    def allocate(self, count: int) -> list[int]:
        """Takes `count` blocks, forgetting what they held."""
        blocks = self._free.popleft_n(count)
        references, hash_of = self._references, self._hash_of
        for block in blocks:
            references[block] = 1
        cached = [block for block in blocks if hash_of[block] is not None]
        if cached:
            self._num_cached_free -= len(cached)
            self._forget(cached)
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each; a free one leaves the free list."""
        for block in blocks:
            if self._references[block] == 0:
                self._free.remove(block)
                self._num_cached_free -= self._hash_of[block] is not None
            else:
                self.num_shared += 1
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """One reference less to each, in the given order; a sequence gives its blocks back last to first, so that the
        tail of a prefix is evicted before its head. Blocks that hold no known prefix are taken first."""
        references, hash_of, twin_hash = self._references, self._hash_of, self._twin_hash
        known = []
        for block in blocks:
            references[block] = left = references[block] - 1
            if left:
                self.num_shared -= 1
                continue
            if block in twin_hash:
                self._drop_twin(block)
                if self._parts is not None:
                    self._parts.remove(block)
            if hash_of[block] is None:
                self._free.prepend(block)
            else:
                known.append(block)
        self._free.extend(known)
        self._num_cached_free += len(known)

    def record_hash(self, block: int, block_hash: bytes) -> None:
        """Records what an owned block holds. If another block holds the same, that one stays the one to be found."""
        self.record_hash_each((block,), (block_hash,))

    def record_hash_each(self, blocks: Sequence[int], block_hashes: Sequence[bytes]) -> None:
        """Records what each of them holds, as name() does."""
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
        """Records what an owned block that is not full holds."""
        assert self._parts is not None, "parts are to be found again"
        assert self._references[block] > 0, "a free block cannot gain content"
        if self._hash_of[block] is None:
            self._hash_of[block] = PARTIAL_BLOCK
        self._parts.note(block, content)

    def adopt(self, block: int, block_hash: bytes) -> None:
        """Records what a free block holds: the content that a worker kept while the scheduler was away."""
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
        """Forgets every cached prefix; only while nothing is owned. Returns how many blocks held one."""
        assert len(self._free) == self.num_blocks - 1, "blocks are in use"
        held = [block for block, block_hash in enumerate(self._hash_of) if block_hash is not None]
        self._forget(held)
        self._num_cached_free = 0
        return len(held)

    @property
    def cached_hashes(self) -> Iterable[bytes]:
        """Of everything that can be hit now."""
        return self._block_of.keys()

    def _forget(self, blocks: Iterable[int]) -> None:
        """Each of them holds something."""
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
        if self._hash_of[block] == PARTIAL_BLOCK:
            self._forget((block,))
        self._twins.setdefault(block_hash, {})[block] = None
        self._twin_hash[block] = block_hash

    def _promote(self, twin: int, block_hash: bytes) -> None:
        self._drop_twin(twin)
        self._block_of[block_hash] = twin
        self._hash_of[twin] = block_hash

    def _drop_twin(self, block: int) -> None:
        block_hash = self._twin_hash.pop(block)
        twins = self._twins[block_hash]
        del twins[block]
        if not twins:
            del self._twins[block_hash]
