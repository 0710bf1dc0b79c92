"""Which blocks a worker holds in host memory, below its device: by content, the least recently used goes first.

A place is free, being stored into, or holds a block; what is being read stays where it is.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence


class HostTier:
    """Owns the places of one worker. free + storing + held == total at all times."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, -1, -1))  # taken from the end
        self._held: OrderedDict[bytes, int] = OrderedDict()  # by hash; least recently used first
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

    def holds(self, block_hash: bytes) -> bool:
        """Whether it can be read."""
        return block_hash in self._held

    def knows(self, block_hash: bytes) -> bool:
        """Whether it can be read, now or soon."""
        return block_hash in self._held or block_hash in self._storing

    def begin_store(self, block_hash: bytes) -> int | None:
        """A place for a block that is not known here; None if every other one is being stored into or read."""
        assert not self.knows(block_hash), "stored once"
        if not self._free and not self._evict():
            return None
        place = self._storing[block_hash] = self._free.pop()
        return place

    def end_store(self, block_hash: bytes, *, failed: bool = False) -> None:
        place = self._storing.pop(block_hash)
        if failed:
            self._free.append(place)
        else:
            self._held[block_hash] = place

    def begin_read(self, block_hashes: Sequence[bytes]) -> list[int]:
        """The places of blocks that are held; they stay until end_read()."""
        self._readers.update(block_hashes)
        for block_hash in reversed(block_hashes):  # the tail of a prefix goes before its head
            self._held.move_to_end(block_hash)
        return [self._held[block_hash] for block_hash in block_hashes]

    def end_read(self, block_hashes: Iterable[bytes], *, failed: bool = False) -> None:
        """`failed`: what they hold is not to be trusted."""
        for block_hash in block_hashes:
            self._readers[block_hash] -= 1
            if not self._readers[block_hash]:
                del self._readers[block_hash]
            if failed and block_hash in self._held and block_hash not in self._readers:
                self._free.append(self._held.pop(block_hash))

    def adopt(self, held: Iterable[tuple[int, bytes]]) -> None:
        """What places hold: the worker kept it while the scheduler was away. Before anything else happens."""
        taken = set()
        for place, block_hash in held:
            if block_hash not in self._held and place not in taken:
                self._held[block_hash] = place
                taken.add(place)
        self._free = [place for place in self._free if place not in taken]

    def forget_all(self) -> int:
        """Forgets what it holds; only while nothing moves. Returns how many blocks that were."""
        assert not self._storing, "something is being stored"
        assert not self._readers, "something is being read"
        count = len(self._held)
        self._free += self._held.values()
        self._held.clear()
        return count

    def _evict(self) -> bool:
        """Frees the place of the least recently used block that nobody reads; whether there was one."""
        for block_hash in self._held:
            if block_hash not in self._readers:
                self._free.append(self._held.pop(block_hash))
                self.num_evicted += 1
                return True
        return False
