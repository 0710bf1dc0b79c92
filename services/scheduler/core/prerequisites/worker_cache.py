"""Cache of entries that a worker prepares once for all sequences that refer to them: grammars and query vectors."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

from quire.services.scheduler.core.prerequisites.blocked import BlockedSequences
from quire.services.scheduler.core.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """Budgets, in the unit of the entries' sizes. None: no limit."""

    max_idle: int  # maximum entries without users
    max_idle_size: int | None = None  # their total size
    capacity: int | None = None  # total size of all placed entries


@dataclass(slots=True)
class CacheEntry:
    """One entry, from the first reference until it is evicted or fails."""

    entry_id: bytes
    size: int
    users: dict[int, Sequence] = field(default_factory=dict)  # sequences that refer to it, by key
    has_place: bool = False  # its size counts, and the worker has the order to prepare it
    is_ready: bool = False


class WorkerCache:
    """Reference counts, budgets, and least-recently-used eviction of entries without users.

    A new entry is placed as soon as there is capacity; unplaced entries are placed in order of arrival. An entry in use
    is never evicted.
    """

    def __init__(
        self,
        limits: CacheLimits,
        blocked: BlockedSequences,
        *,
        prepare: Callable[[CacheEntry], None],
        evict: Callable[[bytes], None],
    ) -> None:
        """`prepare` is called when an entry is placed, `evict` when an entry without users is removed; the worker must
        see both in this order."""
        self._limits, self._blocked = limits, blocked
        self._prepare, self._evict = prepare, evict
        self._entries: dict[bytes, CacheEntry] = {}
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # entries without users, least recently used first
        self._idle_size = 0
        self._unplaced: dict[bytes, None] = {}  # in order of arrival
        self.size = 0  # total size of placed entries

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, entry_id: bytes) -> bool:
        return entry_id in self._entries

    @property
    def num_users(self) -> int:
        """Number of references to entries."""
        return sum(len(entry.users) for entry in self._entries.values())

    def entry(self, entry_id: bytes) -> CacheEntry | None:
        """Returns an entry, if it is known."""
        return self._entries.get(entry_id)

    @property
    def idle_ids(self) -> list[bytes]:
        """Entries without users, least recently used first."""
        return list(self._idle)

    def is_prepared(self, entry_id: bytes) -> bool:
        """Returns whether an entry exists and is ready."""
        entry = self._entries.get(entry_id)
        return entry is not None and entry.is_ready

    def join(self, entry_id: bytes, size: int, sequence: Sequence) -> bool:
        """Adds a reference to an entry, which is created with `size` if it is unknown; returns whether it is ready. If
        not, `sequence` is blocked until ready() or remove() is called for the entry."""
        entry = self._entries.get(entry_id)
        if entry is None:
            entry = self._entries[entry_id] = CacheEntry(entry_id, size)
            self._unplaced[entry_id] = None
        elif entry_id in self._idle:
            self._leave_idle(entry)
        entry.users[sequence.key] = sequence
        if not entry.is_ready:
            self._blocked.add(entry_id, sequence)
        if self._unplaced:
            self._give_places()
        return entry.is_ready

    def leave(self, entry_id: bytes, sequence: Sequence) -> CacheEntry | None:
        """Removes a reference, if there is one. Returns the entry if that was its last one and it is not ready yet."""
        entry = self._entries.get(entry_id)
        if entry is None or entry.users.pop(sequence.key, None) is None:
            return None
        self._blocked.remove(sequence)
        if entry.users:
            return None
        if not entry.is_ready:
            return entry
        self._become_idle(entry)
        return None

    def ready(self, entry_id: bytes) -> list[Sequence]:
        """Marks the entry as ready and unblocks its users; returns the sequences that were blocked on it. An entry
        without users becomes idle. Raises KeyError if the entry is unknown."""
        entry = self._entries[entry_id]
        is_new, entry.is_ready = not entry.is_ready, True
        freed = self._blocked.free(entry_id)
        if is_new and not entry.users:
            self._become_idle(entry)
        return freed

    def remove(self, entry_id: bytes) -> list[Sequence]:
        """Removes an entry that failed or is no longer wanted, without a call of `evict`, and places waiting entries
        in its room; returns its users. Raises KeyError if the entry is unknown."""
        users = list(self._remove_entry(entry_id).users.values())
        self._blocked.free(entry_id)
        self._give_places()
        return users

    def reset(self) -> list[CacheEntry]:
        """Drops everything that is ready. Returns the entries still in use: they have to be prepared again, and block
        their users until then."""
        for entry_id in list(self._idle):
            self._remove_entry(entry_id)
        lost = [entry for entry in self._entries.values() if entry.is_ready]
        for entry in lost:
            entry.is_ready = False
            for sequence in entry.users.values():
                self._blocked.add(entry.entry_id, sequence)
        return lost

    @property
    def first_unplaced(self) -> CacheEntry | None:
        """Entry that has waited longest for a place."""
        return self._entries[next(iter(self._unplaced))] if self._unplaced else None

    @property
    def placed(self) -> Iterator[CacheEntry]:
        """Entries with a place."""
        return (entry for entry in self._entries.values() if entry.has_place)

    def place_first(self, entry_ids: Collection[bytes]) -> None:
        """Places the entries of one user before all others. Those in use by others, which must be ready and have users
        that wait for other entries, lose their places and wait for new ones."""
        for entry in [entry for entry in self.placed if entry.users and entry.entry_id not in entry_ids]:
            entry.has_place = entry.is_ready = False
            self.size -= entry.size
            self._unplaced[entry.entry_id] = None
            self._evict(entry.entry_id)
        self._unplaced = dict.fromkeys([each for each in entry_ids if each in self._unplaced]) | self._unplaced
        self._give_places()

    def check_invariant(self) -> None:
        """Raises AssertionError if sizes, places and references do not add up."""
        placed = [entry for entry in self._entries.values() if entry.has_place]
        capacity = self._limits.capacity
        assert self.size == sum(entry.size for entry in placed), "sizes of entries with a place add up"
        assert capacity is None or self.size <= capacity, "entries fit"
        assert self._unplaced.keys() == self._entries.keys() - {entry.entry_id for entry in placed}
        idle = {entry_id for entry_id, entry in self._entries.items() if entry.is_ready and not entry.users}
        assert idle == set(self._idle), "entries without users are idle"
        assert self._idle_size == sum(self._entries[entry_id].size for entry_id in idle)

    def _give_places(self) -> None:
        """Places entries in order of arrival, evicting idle entries where needed; no entry overtakes another."""
        capacity = self._limits.capacity
        for entry_id in list(self._unplaced):
            entry = self._entries[entry_id]
            while capacity is not None and self.size + entry.size > capacity and self._idle:
                self._evict_oldest()
            if capacity is not None and self.size + entry.size > capacity:
                return
            self._prepare(entry)  # first: if this raises, the entry is not placed
            del self._unplaced[entry_id]
            self.size += entry.size
            entry.has_place = True

    def _become_idle(self, entry: CacheEntry) -> None:
        """Marks an entry without users as idle, evicts the least recently used idle entries beyond their limits, and
        places entries that wait for capacity."""
        self._idle[entry.entry_id] = None
        self._idle_size += entry.size
        most = self._limits.max_idle_size
        while len(self._idle) > self._limits.max_idle or (most is not None and self._idle_size > most):
            self._evict_oldest()
        self._give_places()

    def _leave_idle(self, entry: CacheEntry) -> None:
        del self._idle[entry.entry_id]
        self._idle_size -= entry.size

    def _evict_oldest(self) -> None:
        entry_id = next(iter(self._idle))
        self._remove_entry(entry_id)
        self._evict(entry_id)

    def _remove_entry(self, entry_id: bytes) -> CacheEntry:
        """Removes and returns an entry, whatever its state, and subtracts its size. Does not call `evict` and does
        not unblock the entry's users."""
        entry = self._entries.pop(entry_id)
        self._unplaced.pop(entry_id, None)
        if entry_id in self._idle:
            self._leave_idle(entry)
        if entry.has_place:
            self.size -= entry.size
        return entry
