"""Eviction policies of KV tiers: least recently used (LRU), or adaptive between recency and frequency (ARC)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Protocol

CanEvict = Callable[[bytes], bool]


class Eviction(Protocol):
    """Eviction order of the blocks in a tier, by their hashes."""

    def miss(self, block_hash: bytes) -> None:
        """Notes that a block will be added, before another one is evicted for it."""

    def add(self, block_hash: bytes) -> None:
        """Adds a block to the order."""

    def touch(self, block_hash: bytes) -> None:
        """Marks a block as used."""

    def evict(self, can_evict: CanEvict) -> bytes | None:
        """Removes and returns the first block that may be evicted; None if there is none."""

    def drop(self, block_hash: bytes) -> None:
        """Removes a block whose content is invalid."""

    def clear(self) -> None: ...


class LRU:
    """Evicts the least recently used block that may be evicted."""

    def __init__(self, _capacity: int) -> None:
        self._order: OrderedDict[bytes, None] = OrderedDict()

    def miss(self, block_hash: bytes) -> None:
        pass

    def add(self, block_hash: bytes) -> None:
        self._order[block_hash] = None

    def touch(self, block_hash: bytes) -> None:
        self._order.move_to_end(block_hash)

    def evict(self, can_evict: CanEvict) -> bytes | None:
        return _pop_first(self._order, can_evict)

    def drop(self, block_hash: bytes) -> None:
        del self._order[block_hash]

    def clear(self) -> None:
        self._order.clear()


class ARC:
    """Adaptive replacement cache (Megiddo and Modha, FAST 2003): blocks used once and blocks used repeatedly are two
    lists, and the names of recently evicted blocks show which list should have been longer. A burst of prompts that
    never return does not evict those that do."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._once: OrderedDict[bytes, None] = OrderedDict()  # T1
        self._again: OrderedDict[bytes, None] = OrderedDict()  # T2
        self._lost_once: OrderedDict[bytes, None] = OrderedDict()  # B1: names of what T1 lost
        self._lost_again: OrderedDict[bytes, None] = OrderedDict()  # B2
        self.target = 0.0  # target length of the first list

    def miss(self, block_hash: bytes) -> None:
        """Adapts the target size of the list of blocks used once, if the block was evicted recently: larger if it
        was evicted from that list, smaller if it was evicted from the other one."""
        lost_once, lost_again = len(self._lost_once), len(self._lost_again)
        if block_hash in self._lost_once:
            self.target = min(float(self._capacity), self.target + max(1.0, lost_again / lost_once))
            self._lost_once.move_to_end(block_hash)
        elif block_hash in self._lost_again:
            self.target = max(0.0, self.target - max(1.0, lost_once / lost_again))
            self._lost_again.move_to_end(block_hash)

    def add(self, block_hash: bytes) -> None:
        """Adds a block as used repeatedly if it was evicted recently, otherwise as used once."""
        known = block_hash in self._lost_once or block_hash in self._lost_again
        self._lost_once.pop(block_hash, None)
        self._lost_again.pop(block_hash, None)
        (self._again if known else self._once)[block_hash] = None

    def touch(self, block_hash: bytes) -> None:
        """Moves a block to the recent end of the list of blocks used repeatedly. Raises KeyError if it is in neither
        list."""
        if block_hash in self._once:
            del self._once[block_hash]
            self._again[block_hash] = None
        else:
            self._again.move_to_end(block_hash)

    def evict(self, can_evict: CanEvict) -> bytes | None:
        """Removes and returns the oldest block that may be evicted, first from the list of blocks used once if that
        is as long as its target, else from the other list; remembers its name. None if there is none."""
        first = (self._once, self._lost_once), (self._again, self._lost_again)
        in_turn = first if len(self._once) >= max(1, int(self.target)) else first[::-1]
        for held, lost in in_turn:
            evicted = _pop_first(held, can_evict)
            if evicted is not None:
                lost[evicted] = None
                if len(lost) > self._capacity:
                    lost.popitem(last=False)
                return evicted
        return None

    def drop(self, block_hash: bytes) -> None:
        (self._once if block_hash in self._once else self._again).pop(block_hash)

    def clear(self) -> None:
        for names in (self._once, self._again, self._lost_once, self._lost_again):
            names.clear()
        self.target = 0.0


POLICIES: Mapping[str, Callable[[int], Eviction]] = {"lru": LRU, "arc": ARC}


def _pop_first(order: OrderedDict[bytes, None], can_evict: CanEvict) -> bytes | None:
    """Removes and returns the first block in order that may be evicted; None if there is none."""
    found = next((block_hash for block_hash in order if can_evict(block_hash)), None)
    if found is not None:
        del order[found]
    return found
