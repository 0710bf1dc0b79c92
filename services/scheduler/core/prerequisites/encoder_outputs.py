"""Encoder outputs: rows of embeddings that the worker computes once for all sequences with the same media item.

The worker fetches and encodes an item when it is ordered to, and keeps its rows until their release is ordered. A
sequence uses its rows until the step that completes its prompt is planned, and again if it is preempted. Rows without
users are kept while there is room, so that the same picture in the next turn of a conversation costs nothing. Nor does
an item whose tokens are all in the prefix cache: its rows are needed only if these blocks are evicted before the
sequence is admitted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.port import Prerequisite, Requeue
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus

NONE_CACHED = -1  # less than the end of any item, also of one without tokens
MOST_IDLE = 1 << 16  # items without users; the capacity in embeddings bounds them as well


@dataclass(frozen=True, slots=True)
class EncoderOrder:
    """Order to the worker to encode `item`, or to release the rows of `identifier` if `item` is None."""

    identifier: bytes
    item: MediaItem | None


class EncoderOutputs(Prerequisite):
    """Encoder outputs of one worker. A sequence joins all of its items when it is added to the core, and is blocked
    until the last of them is encoded.

    Items get their room in order of arrival, those of one sequence together. Where sequences that share items still
    hold room that the others need, the one that has waited longest gets all of it."""

    def __init__(
        self,
        capacity: int,
        requeue: Requeue,
        has_keys: Callable[[MediaItem], bool] = lambda _: False,
        num_cached: Callable[[Sequence], int] = lambda _: NONE_CACHED,
    ) -> None:
        """Creates an empty cache. `capacity`: rows of embeddings that the worker keeps, over all items; `has_keys`:
        whether the device has everything that a decoder reads of an item, so that its rows are not needed (encoder-
        decoder models); `num_cached`: leading tokens of a sequence whose KV the device has."""
        super().__init__()
        self._has_keys, self._num_cached = has_keys, num_cached
        # By key of sequence: leading tokens that are not computed again, so that the rows in them are not needed.
        self._skipped: dict[int, int] = {}
        self._requeue = requeue
        limits = CacheLimits(max_idle=MOST_IDLE, capacity=capacity)
        self._cache = WorkerCache(limits, self._blocked, prepare=self._order, evict=self._order_release)
        self.orders: list[EncoderOrder] = []  # not sent to the worker yet; see take_orders()
        self._sources: dict[bytes, object] = {}  # payload of each item that is being prepared
        self._stale: set[bytes] = set()  # being prepared since before the weights changed

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
        return self._join_after(sequence, self._num_cached(sequence) if sequence.media else NONE_CACHED)

    def rejoin(self, sequence: Sequence) -> bool:
        return self.join(sequence)

    def is_ready(self, sequence: Sequence, num_cached: int) -> bool:
        """Returns whether the sequence, of which `num_cached` tokens are cached now, can compute the others. If blocks
        were evicted since it joined, the items in them are ordered, and it is blocked until they are encoded."""
        if min(num_cached, sequence.num_tokens - 1) >= self._skipped.get(sequence.key, NONE_CACHED):
            return True
        return self._join_after(sequence, num_cached)

    def _join_after(self, sequence: Sequence, num_cached: int) -> bool:
        """Adds a sequence to the users of the items of which a token is computed, where `num_cached` tokens are
        not; the last token always is."""
        self._skipped.pop(sequence.key, None)
        if num_cached > NONE_CACHED:
            self._skipped[sequence.key] = min(num_cached, sequence.num_tokens - 1)
        items = [*{item.identifier: item for item in self._needed(sequence)}.values()]
        items.sort(key=lambda item: item.identifier not in self._cache)  # room for new ones evicts none of its own
        for item in items:
            self._cache.join(item.identifier, item.num_embeddings, sequence)
        self._end_deadlock()
        return not self._block(sequence)

    def _needed(self, sequence: Sequence) -> list[MediaItem]:
        """Returns the sequence's items whose rows it needs."""
        begin = self._skipped.get(sequence.key, NONE_CACHED)
        return [item for item in sequence.media if item.end > begin and not self._has_keys(item)]

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Removes the sequences from the users of their items: the step that is being planned reads the rows last."""
        for sequence in sequences:
            self._skipped.pop(sequence.key, None)
            for item in sequence.media:
                self._cache.leave(item.identifier, sequence)
        self._end_deadlock()
        return []

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the users of its media items. Items that the worker has not been ordered to encode
        are dropped with their last user; encoded ones stay cached."""
        self._skipped.pop(sequence.key, None)
        for item in _unique(sequence):
            unused = self._cache.leave(item.identifier, sequence)
            if unused is not None and not unused.has_place:  # else the worker is computing it
                self._cache.remove(item.identifier)
        super().leave(sequence)
        self._end_deadlock()

    def complete(self, identifier: bytes, *, failed: bool = False) -> list[Sequence]:
        """Applies the worker's answer to an order to encode. Returns the sequences to continue: those for which this
        was the last item that was not encoded.

        After a failure returns the sequences to fail instead: those whose item names the source that was tried (its
        payload). If others have the item from another source, they stay blocked, and the worker is ordered to try
        theirs; otherwise the next sequence with the item causes a new order. Rows that were ordered before reset() are
        released, and the item is prepared again."""
        source = self._sources.pop(identifier)
        was_stale = identifier in self._stale
        self._stale.discard(identifier)
        if was_stale and not failed:
            self._prepare_again(identifier)
            return []
        if not failed:
            freed = [sequence for sequence in self._cache.ready(identifier) if not self._block(sequence)]
            self._end_deadlock()
            return freed
        users = self._cache.remove(identifier)
        lost = [sequence for sequence in users if _item(sequence, identifier).payload == source]
        for sequence in users:
            if sequence not in lost:
                self._cache.join(identifier, _item(sequence, identifier).num_embeddings, sequence)
                self._block(sequence)
        self._end_deadlock()
        return lost

    def _prepare_again(self, identifier: bytes) -> None:
        """Releases rows that may be those of other weights, and orders the item again if a sequence waits for it."""
        self._order_release(identifier)
        entry = self._cache.entry(identifier)
        if entry is not None and entry.users:
            self._order(entry)
        else:
            self._cache.remove(identifier)

    def count_time(self, identifier: bytes, span: tuple[float, float]) -> None:
        """Adds the span in which an item was encoded, before it is complete(), to the encoding time of the sequences
        that have it. `span`: begin and end, seconds."""
        entry = self._cache.entry(identifier)
        for sequence in () if entry is None else entry.users.values():
            sequence.count_encoding(*span)

    def reset(self) -> None:
        """Drops all rows, because the weights that computed them are gone; no step is in flight. Sequences that were
        ready to run are blocked until their items have been encoded again. Items that are being prepared are stale:
        the worker may encode them before it changes its weights, or drop them with the others."""
        self._stale.update(self._sources)
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
        orders, self.orders = self.orders, []
        return orders

    def check_invariant(self) -> None:
        super().check_invariant()
        self._cache.check_invariant()
        assert all(self._cache.entry(identifier) is not None for identifier in self._sources), "orders have entries"
        assert self._stale <= self._sources.keys(), "stale items are being prepared"

    def _end_deadlock(self) -> None:
        """Gives all room to the sequence that has waited longest, if every item that is kept is used only by sequences
        that wait for room: they share items with sequences that are gone, and none of them would ever run."""
        first = self._cache.first_unplaced
        if first is None or any(not entry.is_ready or self._is_of_use(entry) for entry in self._cache.placed):
            return
        sequence = next(iter(first.users.values()))
        self._cache.place_first([*{item.identifier: None for item in self._needed(sequence)}])

    def _is_of_use(self, entry: CacheEntry) -> bool:
        """Returns whether a sequence with this item has all of its items, or none needs it any more."""
        return not entry.users or any(self._is_placed(sequence) for sequence in entry.users.values())

    def _is_placed(self, sequence: Sequence) -> bool:
        """Returns whether all of the sequence's items have room."""
        entries = (self._cache.entry(item.identifier) for item in self._needed(sequence))
        return all(entry is not None and entry.has_place for entry in entries)

    def _block(self, sequence: Sequence) -> bool:
        """Blocks `sequence` until its first item that is not encoded is; returns whether there is one."""
        for item in self._needed(sequence):
            if not self._cache.is_prepared(item.identifier):
                self._blocked.add(item.identifier, sequence)
                return True
        return False

    def _order(self, entry: CacheEntry) -> None:
        """Adds an order to encode the item of `entry`, from the source that its first user names."""
        item = _item(next(iter(entry.users.values())), entry.entry_id)
        self._sources[entry.entry_id] = item.payload
        self.orders.append(EncoderOrder(entry.entry_id, item))

    def _order_release(self, identifier: bytes) -> None:
        self.orders.append(EncoderOrder(identifier, None))


def _item(sequence: Sequence, identifier: bytes) -> MediaItem:
    """Returns the sequence's first item with this identifier, which it must have."""
    return next(item for item in sequence.media if item.identifier == identifier)


def _unique(sequence: Sequence) -> list[MediaItem]:
    """Returns the sequence's items, each identifier once."""
    return list({item.identifier: item for item in sequence.media}.values())
