"""What requests say of the worth of their prompts: which blocks a tier loses first, and which last.

The word is kept by the block's hash, for as long as that is likely to matter: also before the tier holds the block, and
after it has lost it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable

from quire.services.scheduler.kv_cache.eviction import CanEvict, Eviction

HIGH_SHARE = 2  # at most one of so many places is kept by high priority


class KVPriority(enum.IntEnum):
    """Of a request's prompt."""

    LOW = -1  # it goes before all others
    NORMAL = 0
    HIGH = 1  # it goes after all others


class PriorityEviction:
    """An Eviction for each priority; within one, blocks go as that one says.

    High priority is given to half of the places at most. Beyond that it is taken from those blocks for which it was
    asked longest ago: they are like others then, and among these the last to go.
    """

    def __init__(self, capacity: int, make: Callable[[int], Eviction]) -> None:
        self._orders = {priority: make(capacity) for priority in KVPriority}
        self._priorities: dict[bytes, KVPriority] = {}  # of blocks that are held, where it is not NORMAL
        self._low: OrderedDict[bytes, None] = OrderedDict()  # held or not, like those of _high
        self._high: OrderedDict[bytes, None] = OrderedDict()  # for which it was asked longest ago first
        self._held: set[bytes] = set()
        self._most_low, self._most_high = capacity, capacity // HIGH_SHARE

    def set_priority(self, block_hashes: Iterable[bytes], priority: KVPriority) -> None:
        """Of a prompt that comes in. Whoever asks for less than others did before takes nothing from them."""
        if priority is KVPriority.HIGH:
            for block_hash in block_hashes:
                self._low.pop(block_hash, None)
                self._high[block_hash] = None
                self._high.move_to_end(block_hash)
                self._regrade(block_hash)
            while len(self._high) > self._most_high:
                self._regrade(self._high.popitem(last=False)[0])
        elif priority is KVPriority.LOW:
            for block_hash in block_hashes:
                if block_hash not in self._held and block_hash not in self._high:
                    self._low[block_hash] = None
            while len(self._low) > self._most_low:
                self._regrade(self._low.popitem(last=False)[0])
        elif self._low:
            for block_hash in block_hashes:
                if block_hash in self._low:
                    del self._low[block_hash]
                    self._regrade(block_hash)

    def is_high(self, block_hash: bytes) -> bool:
        return block_hash in self._high

    def miss(self, block_hash: bytes) -> None:
        self._orders[self._asked(block_hash)].miss(block_hash)

    def add(self, block_hash: bytes) -> None:
        priority = self._asked(block_hash)
        self._held.add(block_hash)
        if priority:
            self._priorities[block_hash] = priority
        self._orders[priority].add(block_hash)

    def use(self, block_hash: bytes) -> None:
        self._orders[self._priorities.get(block_hash, KVPriority.NORMAL)].use(block_hash)

    def evict(self, can_evict: CanEvict) -> bytes | None:
        for order in self._orders.values():  # LOW, NORMAL, HIGH
            gone = order.evict(can_evict)
            if gone is not None:
                self._held.discard(gone)
                self._priorities.pop(gone, None)
                return gone
        return None

    def drop(self, block_hash: bytes) -> None:
        self._held.discard(block_hash)
        self._orders[self._priorities.pop(block_hash, KVPriority.NORMAL)].drop(block_hash)

    def clear(self) -> None:
        for order in self._orders.values():
            order.clear()
        for kept in (self._priorities, self._low, self._high, self._held):
            kept.clear()

    def _asked(self, block_hash: bytes) -> KVPriority:
        if block_hash in self._high:
            return KVPriority.HIGH
        return KVPriority.LOW if block_hash in self._low else KVPriority.NORMAL

    def _regrade(self, block_hash: bytes) -> None:
        """What is asked for a block may have changed."""
        if block_hash not in self._held:
            return
        before, now = self._priorities.get(block_hash, KVPriority.NORMAL), self._asked(block_hash)
        if before is not now:
            self.drop(block_hash)
            self.add(block_hash)
