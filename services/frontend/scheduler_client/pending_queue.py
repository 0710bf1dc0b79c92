"""Groups of sequences that wait for a bounded time: for a usable session, or before they are submitted again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.services.frontend.scheduler_client.sequence import Sequence

LATE_S = 1.0  # a timer this late means that the process was suspended
SECOND_WAIT_S = 5.0  # extra wait after a suspension, for sessions to reconnect

Group = tuple[Sequence, ...]  # consecutive samples of one prompt without tokens, or a single sequence


@dataclass(slots=True, eq=False)
class _PendingGroup:
    """A group that waits for a scheduler, and its timer."""

    group: Group
    num_waiting: int  # of the group
    latest_s: float
    timer: asyncio.TimerHandle | None = None


class PendingQueue:
    """FIFO queue with a timeout per group; `on_time` is called with each group whose wait is over."""

    def __init__(
        self, on_time: Callable[[Group], None], *, late_s: float = LATE_S, second_wait_s: float = SECOND_WAIT_S
    ) -> None:
        """Creates an empty queue. `late_s`: a timer at least this late is followed by a second wait."""
        self._on_time = on_time
        self._late_s, self._second_wait_s = late_s, second_wait_s
        self._entries: dict[_PendingGroup, None] = {}  # ordered by arrival
        self._entry_of: dict[Sequence, _PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_sequences(self) -> int:
        """Number of sequences in all groups."""
        return len(self._entry_of)

    def add(self, group: Group, wait_s: float, max_wait_s: float) -> None:
        """Adds a group that waits `wait_s`; extensions end after `max_wait_s`. If it raises, remove() undoes its
        effects."""
        entry = _PendingGroup(group, len(group), asyncio.get_running_loop().time() + max_wait_s)
        self._entry_of.update(dict.fromkeys(group, entry))
        self._entries[entry] = None
        self._wait(entry, wait_s)

    def extend_waits(self, wait_s: float) -> None:
        """Extends the wait of every group to `wait_s` from now, within its `max_wait_s`; called when a scheduler
        connects."""
        now = asyncio.get_running_loop().time()
        for entry in self._entries:
            assert entry.timer is not None
            end_s = min(now + wait_s, entry.latest_s)
            if end_s > entry.timer.when():
                entry.timer.cancel()
                self._wait(entry, end_s - now)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Removes sequences, if present; a group leaves with its last member."""
        for sequence in sequences:
            entry = self._entry_of.pop(sequence, None)
            if entry is not None:
                entry.num_waiting -= 1
                if not entry.num_waiting:
                    self._end(entry)

    def take_all(self) -> list[Group]:
        """Removes and returns all groups, in order of arrival; their timers are cancelled."""
        groups = [entry.group for entry in self._entries]
        for group in groups:
            self.remove(group)
        return groups

    def _wait(self, entry: _PendingGroup, wait_s: float) -> None:
        entry.timer = asyncio.get_running_loop().call_later(wait_s, self._expire, entry)

    def _expire(self, entry: _PendingGroup) -> None:
        """Removes a group whose wait is over and passes it to `on_time`; a timer that fired late is followed by a
        second wait."""
        assert entry.timer is not None
        if asyncio.get_running_loop().time() - entry.timer.when() > self._late_s:
            self._wait(entry, self._second_wait_s)
            return
        self.remove(entry.group)
        self._on_time(entry.group)

    def _end(self, entry: _PendingGroup) -> None:
        self._entries.pop(entry, None)
        if entry.timer is not None:
            entry.timer.cancel()
