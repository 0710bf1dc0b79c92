"""How long one piece of work, and ten turns in a row, hold a frontend's event loop, in CPU time of its thread, so that
other load on the machine does not matter. The frontend runs in this process, with a scripted scheduler and model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

from quire import bundled
from tests.attacks.calls import Target
from tests.attacks.measure import attacker
from tests.attacks.memory import Growth, Memory
from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

NUM_TURNS = 10  # of the loop, from the arrival of a short request to its first token


@dataclass
class Holds:
    """Longest blocking times, in seconds."""

    longest: float = 0.0  # of one callback
    longest_turns: float = 0.0  # of NUM_TURNS consecutive turns of the loop: what a first token waits for others
    _turns: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TURNS))

    def add_turn(self, seconds: float) -> None:
        self._turns.append(seconds)
        self.longest_turns = max(self.longest_turns, sum(self._turns))


@dataclass(frozen=True, slots=True)
class HeldConnections:
    """Result of one attack."""

    statuses: dict[str, int]
    num_bytes: int
    longest_s: float
    longest_turns_s: float
    growth: Growth


@contextlib.contextmanager
def watched() -> Iterator[Holds]:
    """Times every callback and every turn of asyncio's loop in this thread."""
    holds, run, run_once = Holds(), asyncio.Handle._run, asyncio.BaseEventLoop._run_once  # type: ignore[attr-defined]

    def timed(handle: asyncio.Handle) -> None:
        began_s = time.thread_time()
        run(handle)
        holds.longest = max(holds.longest, time.thread_time() - began_s)

    def timed_turn(loop: asyncio.BaseEventLoop) -> None:
        began_s = time.thread_time()
        run_once(loop)
        holds.add_turn(time.thread_time() - began_s)

    asyncio.Handle._run = timed  # type: ignore[attr-defined]
    asyncio.BaseEventLoop._run_once = timed_turn  # type: ignore[attr-defined]
    try:
        yield holds
    finally:
        asyncio.Handle._run = run  # type: ignore[attr-defined]
        asyncio.BaseEventLoop._run_once = run_once  # type: ignore[attr-defined]


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
        growth = memory.growth()
    return HeldConnections(answer["statuses"], answer["bytes"], holds.longest, holds.longest_turns, growth)
