"""Blocks in one KV tier below the device (host memory, disk): an index from content to places.

A place is free, being stored into, or holds a block. Blocks that are being read, or are pinned, are not evicted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from quire.services.scheduler.kv_cache.eviction import LRU, Eviction
from quire.services.scheduler.kv_cache.kv_priority import KVPriority, PriorityEviction


class BlockTier:
    """Owns the places of one tier of one worker. free + storing + held == total at all times."""

    def __init__(self, num_places: int, make: Callable[[int], Eviction] = LRU) -> None:
        """`make`: creates the eviction policy among blocks of equal priority, from the number of places."""
        self.num_places = num_places
        self._eviction = PriorityEviction(num_places, make)
        self._free = list(range(num_places - 1, -1, -1))  # used as a stack
        self._held: dict[bytes, int] = {}  # place by hash
        self._storing: dict[bytes, int] = {}
        self._readers: Counter[bytes] = Counter()
        self.num_evicted = 0

    @property
    def num_held(self) -> int:
        return len(self._held)

    @property
    def num_storing(self) -> int:
        return len(self._storing)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def set_priority(self, block_hashes: Sequence[bytes], priority: KVPriority) -> None:
        """Sets the priority of a prompt's blocks, stored or not."""
        self._eviction.set_priority(block_hashes, priority)

    def is_high(self, block_hash: bytes) -> bool:
        """Returns whether the block is evicted after all others."""
        return self._eviction.is_high(block_hash)

    def holds(self, block_hash: bytes) -> bool:
        """Returns whether the block can be read."""
        return block_hash in self._held

    def holds_or_stores(self, block_hash: bytes) -> bool:
        """Returns whether the block can be read now or once its store has ended."""
        return block_hash in self._held or block_hash in self._storing

    def begin_store(self, block_hash: bytes) -> int | None:
        """Reserves and returns a place for a block that is not in the tier, evicting another block if no place is
        free; None if every place is being stored into or pinned."""
        assert not self.holds_or_stores(block_hash), "stored once"
        self._eviction.miss(block_hash)
        if not self._free and not self._evict():
            return None
        place = self._storing[block_hash] = self._free.pop()
        return place

    def end_store(self, block_hash: bytes, *, failed: bool = False) -> None:
        """Ends a store: the block can be read from now on; after a failed store its place is free again."""
        place = self._storing.pop(block_hash)
        if failed:
            self._free.append(place)
        else:
            self._held[block_hash] = place
            self._eviction.add(block_hash)

    def begin_read(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Returns the places of stored blocks, marks them as used, and pins them until end_read()."""
        self.touch(block_hashes)
        return self.pin(block_hashes)

    def pin(self, block_hashes: Sequence[bytes]) -> list[int]:
        """Returns the places of stored blocks and pins them until end_read(), without marking them as used."""
        self._readers.update(block_hashes)
        return [self._held[block_hash] for block_hash in block_hashes]

    def touch(self, block_hashes: Sequence[bytes]) -> None:
        """Marks the stored blocks of a prefix as used, so that its tail is evicted before its head."""
        for block_hash in reversed(block_hashes):
            if block_hash in self._held:
                self._eviction.touch(block_hash)

    def end_read(self, block_hashes: Iterable[bytes], *, failed: bool = False) -> None:
        """Ends one read of each block and unpins blocks without further readers. `failed`: their content is not
        valid, and blocks that no other reader has pinned are dropped."""
        for block_hash in block_hashes:
            self._readers[block_hash] -= 1
            if not self._readers[block_hash]:
                del self._readers[block_hash]
            if failed and block_hash in self._held and block_hash not in self._readers:
                self._eviction.drop(block_hash)
                self._free.append(self._held.pop(block_hash))

    def adopt(self, held: Iterable[tuple[int, bytes]]) -> None:
        """Records the content of places that the worker kept while the scheduler was away, least recently used first.
        Only valid before any other operation."""
        used_places = set(self._held.values())
        for place, block_hash in held:
            if block_hash not in self._held and place not in used_places:
                self._held[block_hash] = place
                self._eviction.add(block_hash)
                used_places.add(place)
        self._free = [place for place in self._free if place not in used_places]

    def clear(self) -> int:
        """Drops all blocks; only valid while none is stored or read. Returns the number of dropped blocks."""
        assert not self._storing, "something is being stored"
        assert not self._readers, "something is being read"
        count = len(self._held)
        self._free += self._held.values()
        self._held.clear()
        self._eviction.clear()
        return count

    def held(self) -> list[bytes]:
        return list(self._held)

    def _evict(self) -> bool:
        """Evicts the first block that is not pinned; returns whether there was one."""
        evicted = self._eviction.evict(lambda block_hash: block_hash not in self._readers)
        if evicted is None:
            return False
        self._free.append(self._held.pop(evicted))
        self.num_evicted += 1
        return True
