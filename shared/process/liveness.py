"""Detects stuck parts of a process: a part that has work must make progress.

Checked every second. As in quire.shared.process.watchdog, checks are counted instead of time, so that a process that
was suspended does not count as dead afterwards.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from quire.shared.logs import logger

log = logger("liveness")

LOOK_S = 1.0

Progress = Callable[[], Mapping[str, object]]  # parts that have work -> a value that changes with progress


@dataclass(slots=True)
class _Watched:
    """Group of parts, with their progress at the last check and their numbers of checks without progress."""

    progress: Progress
    most_looks: int
    seen: Mapping[str, object] = field(default_factory=dict)
    num_looks: Counter[str] = field(default_factory=Counter)  # checks without progress

    def look(self) -> None:
        """Makes one check: counts it for parts that were there before and report the same progress, and resets the
        count of others."""
        before, self.seen = self.seen, self.progress()
        still = [part for part, done in self.seen.items() if part in before and before[part] == done]
        self.num_looks = Counter({part: self.num_looks[part] + 1 for part in still})

    @property
    def dead(self) -> list[str]:
        return [part for part, num_looks in self.num_looks.items() if num_looks > self.most_looks]


class Liveness:
    """Liveness of one process by the progress of its parts, independent of its peers."""

    def __init__(self, check_s: float = LOOK_S) -> None:
        """Starts without parts. `check_s`: interval of the checks."""
        self._check_s = check_s
        self._watched: list[_Watched] = []
        self._dead: list[str] = []

    def watch(self, progress: Progress, patience_s: float) -> None:
        """Adds parts to watch: `progress` is called at every check; its keys name the parts in logs. A part is dead
        after `patience_s` without progress."""
        self._watched.append(_Watched(progress, max(1, round(patience_s / self._check_s))))

    @property
    def is_alive(self) -> bool:
        """Whether every part that has work makes progress."""
        return not self._dead

    async def run(self, tell: Callable[[bool], Awaitable[None]]) -> None:
        """Checks for ever; `tell` is called with the result after each check."""
        while True:
            await asyncio.sleep(self._check_s)
            self.look()
            await tell(self.is_alive)

    def look(self) -> None:
        """Makes one check of all watched parts and logs an error when the set of dead parts changes."""
        before = self._dead
        for watched in self._watched:
            watched.look()
        self._dead = [part for watched in self._watched for part in watched.dead]
        if self._dead != before:
            log.error("the service has work but makes no progress", parts=",".join(self._dead) or "none")
