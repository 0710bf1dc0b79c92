"""Where sequences wait for a session that can run them, each for a bounded time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.frontend.scheduler_client.sequence import Sequence

Group = tuple[Sequence, ...]  # consecutive samples of one work without tokens, or a single sequence


class WaitingRoom:
    """First in, first out; `give_up` is told of a group that waited `patience_s` in vain."""

    def __init__(self, patience_s: float, give_up: Callable[[Group], None]) -> None:
        self._patience_s = patience_s
        self._give_up = give_up
        self._timers: dict[Group, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._timers)

    def enter(self, group: Group) -> None:
        loop = asyncio.get_running_loop()
        self._timers[group] = loop.call_later(self._patience_s, self._expire, group)

    def _expire(self, group: Group) -> None:
        del self._timers[group]
        self._give_up(group)

    def leave(self) -> list[Group]:
        """Everybody, in order of arrival."""
        groups = list(self._timers)
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        return groups
