"""Encoder outputs: rows of embeddings that the worker computes once for all sequences with the same media item.

The worker fetches and encodes an item when it is ordered to, and keeps its rows until their release is ordered. A
sequence uses its rows until the step that completes its prompt is planned, and again if it is preempted. Rows without
users are kept while there is room, so that the same picture in the next turn of a conversation costs nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.port import Prerequisite, Requeue
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus

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

    def __init__(
        self, capacity: int, requeue: Requeue, has_keys: Callable[[MediaItem], bool] = lambda _: False
    ) -> None:
        """Creates an empty cache. `capacity`: rows of embeddings that the worker keeps, over all items; `has_keys`:
        whether the device has everything that a decoder reads of an item, so that its rows are not needed (encoder-
        decoder models)."""
        super().__init__()
        self._has_keys = has_keys
        self._requeue = requeue
        limits = CacheLimits(max_idle=MOST_IDLE, capacity=capacity)
        self._cache = WorkerCache(limits, self._blocked, prepare=self._order, evict=self._order_release)
        self._orders: list[EncoderOrder] = []
        self._sources: dict[bytes, object] = {}  # payload of each item that is being prepared

    @property
    def num_embeddings(self) -> int:
        """Embeddings that are kept or being computed."""
        return self._cache.size

    @property
    def num_items(self) -> int:
        """Items that are kept, being computed or waiting for room."""
        return len(self._cache)

    def num_missing(self, sequence: Sequence) -> int:
        """Returns the embeddings of the sequence's items that are neither kept nor being computed."""
        return sum(item.num_embeddings for item in _unique(sequence) if item.identifier not in self._cache)

    def join(self, sequence: Sequence) -> bool:
        """Adds a sequence to the users of its items, and orders those that are not kept when there is room. Returns
        whether all of them are encoded, or not needed; otherwise the sequence is blocked."""
        items = [item for item in _unique(sequence) if not self._has_keys(item)]
        items.sort(key=lambda item: item.identifier not in self._cache)  # room for new ones evicts none of its own
        for item in items:
            self._cache.join(item.identifier, item.num_embeddings, sequence)
        return not self._block(sequence)

    def rejoin(self, sequence: Sequence) -> bool:
        return self.join(sequence)

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Removes the sequences from the users of their items: the step that is being planned reads the rows last."""
        for sequence in sequences:
            for item in sequence.media:
                self._cache.leave(item.identifier, sequence)
        return []

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the users of its media items. Items that the worker has not been ordered to encode
        are dropped with their last user; encoded ones stay cached."""
        for item in _unique(sequence):
            unused = self._cache.leave(item.identifier, sequence)
            if unused is not None and not unused.has_place:  # else the worker is computing it
                self._cache.remove(item.identifier)
        super().leave(sequence)

    def complete(self, identifier: bytes, *, failed: bool = False) -> list[Sequence]:
        """Applies the worker's answer to an order to encode. Returns the sequences to continue: those for which this
        was the last item that was not encoded.

        After a failure returns the sequences to fail instead: those whose item names the source that was tried (its
        payload). If others have the item from another source, they stay blocked, and the worker is ordered to try
        theirs; otherwise the next sequence with the item causes a new order."""
        source = self._sources.pop(identifier)
        if not failed:
            return [sequence for sequence in self._cache.ready(identifier) if not self._block(sequence)]
        users = self._cache.remove(identifier)
        lost = [sequence for sequence in users if _item(sequence, identifier).payload == source]
        for sequence in users:
            if sequence not in lost:
                self._cache.join(identifier, _item(sequence, identifier).num_embeddings, sequence)
                self._block(sequence)
        return lost

    def reset(self) -> None:
        """Drops all rows, because the weights that computed them are gone; no step is in flight. Sequences that were
        ready to run are blocked until their items have been encoded again."""
        already_blocked = {sequence.key for sequence in self._blocked}
        for identifier in self._cache.idle_ids:
            self._order_release(identifier)
        lost = self._cache.reset()
        for entry in lost:
            self._order_release(entry.entry_id)
            self._order(entry)
        for sequence in {user.key: user for entry in lost for user in entry.users.values()}.values():
            if sequence.status is SequenceStatus.BLOCKED and sequence.key not in already_blocked:
                self._blocked.remove(sequence)  # it waits for a sibling, which is blocked here
            else:
                self._requeue.block(sequence)
                self._block(sequence)

    def awaits(self, identifier: bytes) -> bool:
        """Returns whether the worker has been ordered to encode this item and has not answered."""
        entry = self._cache.entry(identifier)
        return entry is not None and entry.has_place and not entry.is_ready

    def take_orders(self) -> list[EncoderOrder]:
        """Returns the orders that have not been sent to the worker, in the order in which it must apply them, and
        clears them."""
        orders, self._orders = self._orders, []
        return orders

    def check_invariant(self) -> None:
        super().check_invariant()
        self._cache.check_invariant()
        assert all(self._cache.entry(identifier) is not None for identifier in self._sources), "orders have entries"

    def _block(self, sequence: Sequence) -> bool:
        """Blocks `sequence` until its first item that is not encoded is; returns whether there is one."""
        for item in sequence.media:
            if not self._cache.is_prepared(item.identifier) and not self._has_keys(item):
                self._blocked.add(item.identifier, sequence)
                return True
        return False

    def _order(self, entry: CacheEntry) -> None:
        """Adds an order to encode the item of `entry`, from the source that its first user names."""
        item = _item(next(iter(entry.users.values())), entry.entry_id)
        self._sources[entry.entry_id] = item.payload
        self._orders.append(EncoderOrder(entry.entry_id, item))

    def _order_release(self, identifier: bytes) -> None:
        self._orders.append(EncoderOrder(identifier, None))


def _item(sequence: Sequence, identifier: bytes) -> MediaItem:
    """Returns the sequence's first item with this identifier, which it must have."""
    return next(item for item in sequence.media if item.identifier == identifier)


def _unique(sequence: Sequence) -> list[MediaItem]:
    """Returns the sequence's items, each identifier once."""
    return list({item.identifier: item for item in sequence.media}.values())
