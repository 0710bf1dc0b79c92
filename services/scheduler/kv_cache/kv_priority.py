"""Retention priority of prompts, from the requests: which blocks a tier evicts first, and which last.

The priority is recorded by block hash for as long as it is likely to matter: also before the tier stores the block, and
after it has evicted it.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from collections.abc import Callable, Iterable

from quire.services.scheduler.kv_cache.eviction import CanEvict, Eviction

HIGH_SHARE = 2  # at most 1 / HIGH_SHARE of the places have high priority


class KVPriority(enum.IntEnum):
    """Retention priority of a request's prompt."""

    LOW = -1  # evicted before all others
    NORMAL = 0
    HIGH = 1  # evicted after all others


class PriorityEviction:
    """One eviction policy per priority; within a priority, blocks are evicted in the order of its policy.

    At most half of the places have high priority. Beyond that, the blocks for which it was requested longest ago lose
    it: they have normal priority then, and are the last of that to be evicted.
    """

    def __init__(self, capacity: int, make: Callable[[int], Eviction]) -> None:
        self._orders = {priority: make(capacity) for priority in KVPriority}
        self._priorities: dict[bytes, KVPriority] = {}  # of stored blocks, where it is not NORMAL
        self._low: OrderedDict[bytes, None] = OrderedDict()  # requested hashes, stored or not
        self._high: OrderedDict[bytes, None] = OrderedDict()  # least recently requested first
        self._held: set[bytes] = set()
        self._most_low, self._most_high = capacity, capacity // HIGH_SHARE

    def set_priority(self, block_hashes: Iterable[bytes], priority: KVPriority) -> None:
        """Sets the priority of a prompt's blocks, stored or not, and moves stored ones to its policy. A lower
        priority than an earlier request's takes nothing from that one; too many blocks of high priority lose it, the
        oldest first."""
        if priority is KVPriority.HIGH:
            for block_hash in block_hashes:
                self._low.pop(block_hash, None)
                self._high[block_hash] = None
                self._high.move_to_end(block_hash)
                self._update_priority(block_hash)
            while len(self._high) > self._most_high:
                self._update_priority(self._high.popitem(last=False)[0])
        elif priority is KVPriority.LOW:
            for block_hash in block_hashes:
                if block_hash not in self._held and block_hash not in self._high:
                    self._low[block_hash] = None
            while len(self._low) > self._most_low:
                self._update_priority(self._low.popitem(last=False)[0])
        elif self._low:
            for block_hash in block_hashes:
                if block_hash in self._low:
                    del self._low[block_hash]
                    self._update_priority(block_hash)

    def is_high(self, block_hash: bytes) -> bool:
        return block_hash in self._high

    def miss(self, block_hash: bytes) -> None:
        self._orders[self._requested(block_hash)].miss(block_hash)

    def add(self, block_hash: bytes) -> None:
        """Adds a block to the policy of the priority that was requested for it, NORMAL by default."""
        priority = self._requested(block_hash)
        self._held.add(block_hash)
        if priority:
            self._priorities[block_hash] = priority
        self._orders[priority].add(block_hash)

    def touch(self, block_hash: bytes) -> None:
        self._orders[self._priorities.get(block_hash, KVPriority.NORMAL)].touch(block_hash)

    def evict(self, can_evict: CanEvict) -> bytes | None:
        """Removes and returns the first block that may be evicted: of LOW priority, else NORMAL, else HIGH; None if
        there is none."""
        for order in self._orders.values():  # LOW, NORMAL, HIGH
            evicted = order.evict(can_evict)
            if evicted is not None:
                self._held.discard(evicted)
                self._priorities.pop(evicted, None)
                return evicted
        return None

    def drop(self, block_hash: bytes) -> None:
        self._held.discard(block_hash)
        self._orders[self._priorities.pop(block_hash, KVPriority.NORMAL)].drop(block_hash)

    def clear(self) -> None:
        """Forgets all blocks and all requested priorities."""
        for order in self._orders.values():
            order.clear()
        for kept in (self._priorities, self._low, self._high, self._held):
            kept.clear()

    def _requested(self, block_hash: bytes) -> KVPriority:
        if block_hash in self._high:
            return KVPriority.HIGH
        return KVPriority.LOW if block_hash in self._low else KVPriority.NORMAL

    def _update_priority(self, block_hash: bytes) -> None:
        """Moves a stored block to the policy of its requested priority."""
        if block_hash not in self._held:
            return
        before, now = self._priorities.get(block_hash, KVPriority.NORMAL), self._requested(block_hash)
        if before is not now:
            self.drop(block_hash)
            self.add(block_hash)
