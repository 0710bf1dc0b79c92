"""Work that holds the event loop for milliseconds: one piece at a time, with pauses for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter

LIGHT_BYTES = 1 << 14  # parsed and checked in half a millisecond
HEAVY_BYTES = 1 << 16  # in two or more
# A first token takes the loop's attention ten times within ten milliseconds: whoever is held up once should be through
# before the next piece.
REST = 3
LONGEST_PAUSE_S = 0.1


class HeavyWorkLimiter:
    """Of one event loop."""

    def __init__(self) -> None:
        self._turns = SmallestFirstLimiter(1)

    @asynccontextmanager
    async def slot(self, num_bytes: int) -> AsyncIterator[None]:
        """Around work on so many bytes. What is light does not wait. Of the rest the lightest goes first; then others
        have a turn of the loop, or, if it was heavy, the loop for `REST` times as long as it took."""
        if num_bytes <= LIGHT_BYTES:
            yield
            return
        async with self._turns.slot(num_bytes):
            began_s = time.thread_time()
            try:
                yield
            finally:
                took_s = time.thread_time() - began_s
                rest = REST if num_bytes > HEAVY_BYTES else 1
                await asyncio.sleep(min(rest * took_s, LONGEST_PAUSE_S))


async def in_steps(steps: Iterator[None]) -> None:
    """Lets others go on between them."""
    for _ in steps:
        await asyncio.sleep(0)
