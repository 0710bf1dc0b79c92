"""Tells a loop that is dead from one that is slow: whoever has something to do must get ahead with it.

Looked at every second. As in quire.shared.process.watchdog looks are counted and not time, so that a process which was
stopped for a while is not dead afterwards.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from quire.shared.logs import logger

log = logger("liveness")

LOOK_S = 1.0

Progress = Callable[[], Mapping[str, object]]  # of those who have something to do: changes with every piece done


@dataclass(slots=True)
class _Watched:
    progress: Progress
    most_looks: int
    seen: Mapping[str, object] = field(default_factory=dict)
    num_looks: Counter[str] = field(default_factory=Counter)  # with the same progress

    def look(self) -> None:
        before, self.seen = self.seen, self.progress()
        still = [part for part, done in self.seen.items() if part in before and before[part] == done]
        self.num_looks = Counter({part: self.num_looks[part] + 1 for part in still})

    @property
    def dead(self) -> list[str]:
        return [part for part, num_looks in self.num_looks.items() if num_looks > self.most_looks]


class Liveness:
    """Of one process, whatever its peers do."""

    def __init__(self) -> None:
        self._watched: list[_Watched] = []
        self._dead: list[str] = []

    def watch(self, progress: Progress, patience_s: float) -> None:
        """`progress` is asked for at every look; its keys are what the log names."""
        self._watched.append(_Watched(progress, max(1, round(patience_s / LOOK_S))))

    @property
    def is_alive(self) -> bool:
        """Everybody who has something to do has got ahead with it."""
        return not self._dead

    async def run(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """For ever; `tell` is told whether all live."""
        while True:
            await asyncio.sleep(LOOK_S)
            self.look()
            await tell(self.is_alive)

    def look(self) -> None:
        before = self._dead
        for watched in self._watched:
            watched.look()
        self._dead = [part for watched in self._watched for part in watched.dead]
        if self._dead != before:
            log.error("has work and does not get ahead", parts=",".join(self._dead) or "none any more")
