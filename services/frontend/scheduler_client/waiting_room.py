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
class _Stay:
    group: Group
    num_waiting: int  # of the group
    latest_s: float
    timer: asyncio.TimerHandle | None = None


class WaitingRoom:
    """First in, first out; `on_time` is told of a group that has waited for its time."""

    def __init__(
        self, on_time: Callable[[Group], None], *, late_s: float = LATE_S, second_wait_s: float = SECOND_WAIT_S
    ) -> None:
        """`late_s`: a timer that goes off so late is followed by a second wait."""
        self._on_time = on_time
        self._late_s, self._second_wait_s = late_s, second_wait_s
        self._stays: dict[_Stay, None] = {}  # in order of arrival
        self._stay_of: dict[Sequence, _Stay] = {}

    def __len__(self) -> int:
        return len(self._stays)

    @property
    def num_sequences(self) -> int:
        """Of all groups."""
        return len(self._stay_of)

    def enter(self, group: Group, wait_s: float, most_s: float) -> None:
        """`most_s`: however often it is renewed. If it raises, leave() undoes what it did."""
        stay = _Stay(group, len(group), asyncio.get_running_loop().time() + most_s)
        self._stay_of.update(dict.fromkeys(group, stay))
        self._stays[stay] = None
        self._wait(stay, wait_s)

    def renew(self, wait_s: float) -> None:
        """Somebody has shown up who may soon be of use: everybody waits for so long from now on, within bounds."""
        now = asyncio.get_running_loop().time()
        for stay in self._stays:
            assert stay.timer is not None
            end_s = min(now + wait_s, stay.latest_s)
            if end_s > stay.timer.when():
                stay.timer.cancel()
                self._wait(stay, end_s - now)

    def leave(self, sequences: Iterable[Sequence]) -> None:
        """Nobody waits for these any more, where they do; a group goes with the last of its members."""
        for sequence in sequences:
            stay = self._stay_of.pop(sequence, None)
            if stay is not None:
                stay.num_waiting -= 1
                if not stay.num_waiting:
                    self._end(stay)

    def clear(self) -> list[Group]:
        """Everybody leaves, in order of arrival."""
        groups = [stay.group for stay in self._stays]
        for group in groups:
            self.leave(group)
        return groups

    def _wait(self, stay: _Stay, wait_s: float) -> None:
        stay.timer = asyncio.get_running_loop().call_later(wait_s, self._expire, stay)

    def _expire(self, stay: _Stay) -> None:
        assert stay.timer is not None
        if asyncio.get_running_loop().time() - stay.timer.when() > self._late_s:
            self._wait(stay, self._second_wait_s)
            return
        self.leave(stay.group)
        self._on_time(stay.group)

    def _end(self, stay: _Stay) -> None:
        self._stays.pop(stay, None)
        if stay.timer is not None:
            stay.timer.cancel()
