"""A semaphore that serves the smallest task first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class SmallestFirstLimiter:
    """Limits concurrency to `places`; of the waiting tasks the one with the least work goes first."""

    def __init__(self, places: int) -> None:
        self.places = places
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._numbers = itertools.count()

    @property
    def has_waiting(self) -> bool:
        """Whether tasks wait for a slot."""
        return bool(self._waiting)

    @asynccontextmanager
    async def slot(self, work: int) -> AsyncIterator[None]:
        """Waits for a slot. `work`: cost of the task in any unit, for the order."""
        if self.places:
            self.places -= 1
        else:
            await self._wait(work)
        try:
            yield
        finally:
            self._release()

    async def _wait(self, work: int) -> None:
        """Waits in the queue until a slot is handed over. A slot that arrives together with a cancellation is passed to
        the next task."""
        called: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (work, next(self._numbers), called))
        try:
            await called
        except asyncio.CancelledError:
            if called.done() and not called.cancelled():
                self._release()
            raise

    def _release(self) -> None:
        """Hands the slot to the waiting task with the least work, or returns it to the free places."""
        while self._waiting:
            called = heapq.heappop(self._waiting)[2]
            if not called.done():
                called.set_result(None)
                return
        self.places += 1
