"""Limits work that blocks the event loop for milliseconds: one piece at a time, with pauses for other tasks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter

LIGHT_BYTES = 1 << 14  # parsed and checked in 0.5 ms
HEAVY_BYTES = 1 << 16  # in 2 ms or more
# A first token needs about ten loop iterations within 10 ms; after one delay it should complete before the next piece.
REST_FACTOR = 3
TURNS_OF_OTHERS = 10  # 20 µs each while the loop has nothing else to do
LONGEST_PAUSE_S = 0.1


class HeavyWorkLimiter:
    """Serializes heavy work on one event loop, with rests in between for the other tasks."""

    def __init__(self) -> None:
        self._turns = SmallestFirstLimiter(1)

    @asynccontextmanager
    async def slot(self, num_bytes: int) -> AsyncIterator[None]:
        """Waits for a slot for work on `num_bytes`. Light work does not wait; of the rest the smallest goes first.
        After heavy work the loop is left to other tasks for `REST_FACTOR` times its duration; after medium work for as
        long as it took."""
        if num_bytes <= LIGHT_BYTES:
            yield
            return
        async with self._turns.slot(num_bytes):
            began_s = time.thread_time()
            try:
                yield
            finally:
                took_s = time.thread_time() - began_s
                factor = REST_FACTOR if num_bytes > HEAVY_BYTES else 1
                await asyncio.sleep(min(factor * took_s, LONGEST_PAUSE_S))


async def in_steps(steps: Iterator[None]) -> None:
    """Runs an iterator, yielding to the event loop after each step."""
    for _ in steps:
        await asyncio.sleep(0)


async def leave_turns() -> None:
    """Leaves the event loop to other tasks for as many iterations as a first token needs: between two portions of one
    call's work a single iteration would let every step of another call wait for a portion."""
    for _ in range(TURNS_OF_OTHERS):
        await asyncio.sleep(0)
