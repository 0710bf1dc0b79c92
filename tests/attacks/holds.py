"""How long one piece of work, and ten turns in a row, hold a frontend's event loop, in CPU time of its thread, so that
other load on the machine does not matter. The frontend runs in this process, with a scripted scheduler and model."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
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

    def add_callback(self, seconds: float) -> None:
        self.longest = max(self.longest, seconds)

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
def _timed(owner: type, name: str, note: Callable[[float], None]) -> Iterator[None]:
    """Reports the processor time of each call of a method to `note`, in seconds of the calling thread."""
    method = getattr(owner, name)

    def timed(self: object) -> None:
        began_s = time.thread_time()
        method(self)
        note(time.thread_time() - began_s)

    setattr(owner, name, timed)
    try:
        yield
    finally:
        setattr(owner, name, method)


@contextlib.contextmanager
def watched() -> Iterator[Holds]:
    """Times every callback and every turn of asyncio's loop in this thread."""
    holds = Holds()
    with (
        _timed(asyncio.Handle, "_run", holds.add_callback),
        _timed(asyncio.BaseEventLoop, "_run_once", holds.add_turn),
    ):
        yield holds


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
