"""Work that holds the event loop for milliseconds: one piece at a time, with pauses for others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from services.frontend.bounds.turns import Turns

LIGHT_BYTES = 1 << 16  # parsed and checked in about a millisecond
LONGEST_PAUSE_S = 0.1


class HeavyWork:
    """Of one event loop."""

    def __init__(self) -> None:
        self._turns = Turns(1)

    @asynccontextmanager
    async def turn(self, num_bytes: int) -> AsyncIterator[None]:
        """Around work on so many bytes. What is light does not wait; of what is heavy, the lightest goes first, and
        then the loop belongs to others for as long as it took."""
        if num_bytes <= LIGHT_BYTES:
            yield
            return
        async with self._turns.turn(num_bytes):
            began_s = time.thread_time()
            try:
                yield
            finally:
                await asyncio.sleep(min(time.thread_time() - began_s, LONGEST_PAUSE_S))


async def in_steps(steps: Iterator[None]) -> None:
    """Lets others go on between them."""
    for _ in steps:
        await asyncio.sleep(0)
