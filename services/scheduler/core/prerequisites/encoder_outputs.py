"""Encoder outputs: rows of embeddings that the worker computes once for all sequences with the same media item.

The worker fetches and encodes an item when it is ordered to, and keeps its rows until their release is ordered. Rows
without users are kept while there is room, so that the same picture in the next turn of a conversation costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.port import Prerequisite
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence

MOST_IDLE = 1 << 16  # items without users; the capacity in embeddings bounds them as well


@dataclass(frozen=True, slots=True)
class EncoderOrder:
    """Order to the worker to encode `item`, or to release the rows of `identifier` if `item` is None."""

    identifier: bytes
    item: MediaItem | None


class EncoderOutputs(Prerequisite):
    """Encoder outputs of one worker. A sequence joins all of its items when it is added to the core, and is blocked
    until the last of them is encoded.

    Items get their room in order of arrival, those of one sequence together, so that two sequences cannot each hold
    room that the other one needs."""

    def __init__(self, capacity: int) -> None:
        """Creates an empty cache. `capacity`: rows of embeddings that the worker keeps, over all items."""
        super().__init__()
        limits = CacheLimits(max_idle=MOST_IDLE, capacity=capacity)
        self._cache = WorkerCache(limits, self._blocked, prepare=self._order, evict=self._order_release)
        self._orders: list[EncoderOrder] = []

    @property
    def num_embeddings(self) -> int:
        """Embeddings that are kept or being computed."""
        return self._cache.size

    @property
    def num_items(self) -> int:
        """Items that are kept, being computed or waiting for room."""
        return len(self._cache)

    def join(self, sequence: Sequence) -> bool:
        for item in _unique(sequence):
            self._cache.join(item.identifier, item.num_embeddings, sequence)
        return not self._block(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the users of its media items. Items that the worker has not been ordered to encode
        are dropped with their last user; encoded ones stay cached."""
        for item in _unique(sequence):
            unused = self._cache.leave(item.identifier, sequence)
            if unused is not None and not unused.has_place:  # else the worker is computing it
                self._cache.remove(item.identifier)
        super().leave(sequence)

    def complete(self, identifier: bytes, *, failed: bool = False) -> list[Sequence]:
        """Handles the worker's answer; returns the sequences that were waiting for this item last, or, after a failure,
        all that have it. The next sequence with the item makes the worker try again."""
        if failed:
            return self._cache.remove(identifier)
        return [sequence for sequence in self._cache.ready(identifier) if not self._block(sequence)]

    def awaits(self, identifier: bytes) -> bool:
        """Returns whether the worker has been ordered to encode this item and has not answered."""
        entry = self._cache.entry(identifier)
        return entry is not None and entry.has_place and not entry.is_ready

    def take_orders(self) -> list[EncoderOrder]:
        """Returns the orders for the worker, in this order."""
        orders, self._orders = self._orders, []
        return orders

    def check_invariant(self) -> None:
        super().check_invariant()
        self._cache.check_invariant()

    def _block(self, sequence: Sequence) -> bool:
        """Blocks `sequence` until its first item that is not encoded is; returns whether there is one."""
        for item in sequence.media:
            if not self._cache.is_prepared(item.identifier):
                self._blocked.add(item.identifier, sequence)
                return True
        return False

    def _order(self, entry: CacheEntry) -> None:
        sequence = next(iter(entry.users.values()))
        item = next(item for item in sequence.media if item.identifier == entry.entry_id)
        self._orders.append(EncoderOrder(entry.entry_id, item))

    def _order_release(self, identifier: bytes) -> None:
        self._orders.append(EncoderOrder(identifier, None))


def _unique(sequence: Sequence) -> list[MediaItem]:
    """Returns the sequence's items, each identifier once."""
    return list({item.identifier: item for item in sequence.media}.values())
