"""Where sequences wait, each for a bounded time: for a session that can run them, or until they may ask again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from quire.services.frontend.scheduler_client.sequence import Sequence

LATE_S = 1.0  # a timer that goes off so late tells of a standstill of this process
SECOND_WAIT_S = 5.0  # for sessions to come back after one: they ended meanwhile

Group = tuple[Sequence, ...]  # consecutive samples of one work without tokens, or a single sequence


@dataclass(slots=True, eq=False)
class _PendingGroup:
    group: Group
    num_waiting: int  # of the group
    latest_s: float
    timer: asyncio.TimerHandle | None = None


class PendingQueue:
    """First in, first out; `on_time` is told of a group that has waited for its time."""

    def __init__(
        self, on_time: Callable[[Group], None], *, late_s: float = LATE_S, second_wait_s: float = SECOND_WAIT_S
    ) -> None:
        """`late_s`: a timer that goes off so late is followed by a second wait."""
        self._on_time = on_time
        self._late_s, self._second_wait_s = late_s, second_wait_s
        self._entries: dict[_PendingGroup, None] = {}  # in order of arrival
        self._entry_of: dict[Sequence, _PendingGroup] = {}

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_sequences(self) -> int:
        """Of all groups."""
        return len(self._entry_of)

    def add(self, group: Group, wait_s: float, max_wait_s: float) -> None:
        """`max_wait_s`: however often it is renewed. If it raises, leave() undoes what it did."""
        entry = _PendingGroup(group, len(group), asyncio.get_running_loop().time() + max_wait_s)
        self._entry_of.update(dict.fromkeys(group, entry))
        self._entries[entry] = None
        self._wait(entry, wait_s)

    def extend_waits(self, wait_s: float) -> None:
        """Somebody has shown up who may soon be of use: everybody waits for so long from now on, within bounds."""
        now = asyncio.get_running_loop().time()
        for entry in self._entries:
            assert entry.timer is not None
            end_s = min(now + wait_s, entry.latest_s)
            if end_s > entry.timer.when():
                entry.timer.cancel()
                self._wait(entry, end_s - now)

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Nobody waits for these any more, where they do; a group goes with the last of its members."""
        for sequence in sequences:
            entry = self._entry_of.pop(sequence, None)
            if entry is not None:
                entry.num_waiting -= 1
                if not entry.num_waiting:
                    self._end(entry)

    def take_all(self) -> list[Group]:
        """Everybody leaves, in order of arrival."""
        groups = [entry.group for entry in self._entries]
        for group in groups:
            self.remove(group)
        return groups

    def _wait(self, entry: _PendingGroup, wait_s: float) -> None:
        entry.timer = asyncio.get_running_loop().call_later(wait_s, self._expire, entry)

    def _expire(self, entry: _PendingGroup) -> None:
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
