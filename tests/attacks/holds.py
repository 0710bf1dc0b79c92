"""How long one piece of work blocks a frontend's event loop, in CPU time of its thread, so that other load on the
machine does not matter. The frontend runs in this process, with a scripted scheduler and model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from quire import bundled
from tests.attacks.calls import Target
from tests.attacks.measure import attacker
from tests.attacks.memory import Growth, Memory
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler


@dataclass
class Holds:
    """Longest blocking times, in seconds."""

    longest: float = 0.0


@dataclass(frozen=True, slots=True)
class HeldConnections:
    """Result of one attack."""

    statuses: dict[str, int]
    num_bytes: int
    longest_s: float
    growth: Growth


@contextlib.contextmanager
def watched() -> Iterator[Holds]:
    """Times every callback of asyncio's loop in this thread."""
    holds, run = Holds(), asyncio.Handle._run  # type: ignore[attr-defined]

    def timed(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        holds.longest = max(holds.longest, time.thread_time() - began_s)

    asyncio.Handle._run = timed  # type: ignore[attr-defined]
    try:
        yield holds
    finally:
        asyncio.Handle._run = run  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def frontend() -> AsyncIterator[Target]:
    gc.collect()
    gc.freeze()  # as a frontend does, so that no garbage collection of older objects falls into an attack
    script = ScriptedScheduler(count_up, max_model_len=4096)
    async with scheduler(script), running(bundled.FOLDER, script.address) as started:
        yield Target(started.frontend.http_address, started.frontend.grpc_address)


async def hold(name: str, target: Target) -> HeldConnections:
    async with attacker(name, target) as go:
        memory = Memory([os.getpid()])
        with watched() as holds:
            answer = await go()
        return HeldConnections(answer["statuses"], answer["bytes"], holds.longest, memory.growth())
