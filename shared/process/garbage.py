"""Schedules Python's cyclic garbage collection for times when a service is idle.

Requests leave almost no reference cycles. A full collection traverses all live objects: 30 ms for a scheduler with
4,096 sequences, in the middle of a step. Young objects are therefore collected only when far more are created than
freed, and all objects when the process is mostly idle, when no collection has run for long, or after something large
with cycles was dropped.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Surplus of created over freed objects that triggers a young collection (2 ms at most); never in a steady state.
YOUNG = 10_000
YOUNG_SEARCHES = 10  # young collections before the next generation is collected
OLD_SEARCHES = 1_000  # collections of that generation before a full one: 100 million surviving objects
LOOK_S = 5.0
QUIET = 0.05  # CPU use below which the process counts as idle, in cores
MIN_INTERVAL_S = 60.0
MAX_INTERVAL_S = 600.0


class Collector:
    """Decides once per check whether to run a full garbage collection, by the process's load and the time since the
    last one."""

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
        self._is_requested = False

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts the periodic checks on the loop."""
        _set_thresholds()
        loop.call_later(LOOK_S, self._check_again, loop)

    def request_collection(self) -> None:
        """Requests a full collection at the next check, after something was dropped that leaves much old garbage."""
        self._is_requested = True

    def look(self) -> None:
        """Runs a full collection if the process was mostly idle since the last check, if none has run for long, or
        if one was requested."""
        now, used = self._clock(), self._processor_time()
        quiet = used - self._used < QUIET * (now - self._looked_at)
        since = now - self._collected_at
        if self._is_requested or since >= MAX_INTERVAL_S or (quiet and since >= MIN_INTERVAL_S):
            self._is_requested = False
            self._collect()
            self._collected_at = self._clock()
        self._looked_at, self._used = self._clock(), self._processor_time()

    def _check_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self.look()
        loop.call_later(LOOK_S, self._check_again, loop)


@contextmanager
def service_gc_thresholds() -> Iterator[None]:
    """Context with a service's collection thresholds, for measurements; restores the former ones at its end and
    unfreezes all objects if none were frozen before."""
    before, was_frozen = gc.get_threshold(), gc.get_freeze_count() > 0
    _set_thresholds()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
        gc.set_threshold(*before)


def _set_thresholds() -> None:
    gc.collect()
    gc.freeze()  # objects from start-up stay alive and are excluded from collection
    gc.set_threshold(YOUNG, YOUNG_SEARCHES, OLD_SEARCHES)
