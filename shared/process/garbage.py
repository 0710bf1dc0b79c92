"""When Python may walk a service's objects in search of cyclic garbage: not while it has work.

Almost nothing that a request leaves behind refers to itself, so that it goes without being looked for. A full search
walks everything that is alive: 30 ms for a scheduler with 4,096 sequences, in the middle of a step. So young objects
are searched only when far more come than go, and everything when the process has little to do, has had no pause for
long, or when something large has gone that did refer to itself.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# More objects that came than went, before the young ones are searched (2 ms at most); while as many go as come, never.
YOUNG = 10_000
YOUNG_SEARCHES = 10  # before those that survived them are searched
OLD_SEARCHES = 1_000  # of the latter, before everything is: 100 million objects that stayed
LOOK_S = 5.0
QUIET = 0.05  # of a core
MOST_OFTEN_S = 60.0
SELDOMEST_S = 600.0


class Collector:
    """Looks now and then whether this is a good moment."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        processor_time: Callable[[], float] = time.process_time,
        collect: Callable[[], object] = gc.collect,
    ) -> None:
        self._clock = clock
        self._processor_time = processor_time
        self._collect = collect
        self._collected_at = self._looked_at = clock()
        self._used = processor_time()
        self._hurries = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """From now on, until the loop ends."""
        _make_seldom()
        loop.call_later(LOOK_S, self._look_again, loop)

    def request_collection(self) -> None:
        """Something has gone that leaves much garbage, all of it old: the next look is not to pass it over."""
        self._hurries = True

    def look(self) -> None:
        """Searches everything if the process has hardly worked since the last look, or it has not been done for
        long, or somebody has asked for it."""
        now, used = self._clock(), self._processor_time()
        quiet = used - self._used < QUIET * (now - self._looked_at)
        since = now - self._collected_at
        if self._hurries or since >= SELDOMEST_S or (quiet and since >= MOST_OFTEN_S):
            self._hurries = False
            self._collect()
            self._collected_at = self._clock()
        self._looked_at, self._used = self._clock(), self._processor_time()

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self.look()
        loop.call_later(LOOK_S, self._look_again, loop)


@contextmanager
def service_gc_thresholds() -> Iterator[None]:
    """For measurements: searches are as seldom as in a service at work."""
    before = gc.get_threshold()
    _make_seldom()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*before)


def _make_seldom() -> None:
    gc.collect()
    gc.freeze()  # what is there at the start stays: it is never walked again
    gc.set_threshold(YOUNG, YOUNG_SEARCHES, OLD_SEARCHES)
