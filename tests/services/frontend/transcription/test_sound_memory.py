"""Transcriptions share a bounded memory; calls wait in order and tenants in turn."""

from __future__ import annotations

import asyncio
import random

import pytest

from quire.services.frontend.transcription.sound_memory import MIB, SAMPLES_BYTES, SoundMemory, memory_of
from quire.shared.errors import DeadlineExceeded
from tests.waiting import loop_turns


class Caller:
    """Call that holds a share from its turn until end()."""

    def __init__(self, memory: SoundMemory, num_bytes: int, tenant: str = "") -> None:
        self.runs, self.ends = False, asyncio.Event()
        self.task = asyncio.create_task(self._run(memory, num_bytes, tenant))

    async def _run(self, memory: SoundMemory, num_bytes: int, tenant: str) -> None:
        async with memory.held(num_bytes, tenant):
            self.runs = True
            await self.ends.wait()

    async def end(self) -> None:
        self.ends.set()
        await self.task
        await turn()


async def turn() -> None:
    await loop_turns(3)


def test_the_memory_of_a_file_is_bounded_by_the_longest_one() -> None:
    assert memory_of(1000) == 2000 + 96_000
    assert memory_of(25 * MIB) == 50 * MIB + SAMPLES_BYTES


@pytest.mark.asyncio
async def test_calls_wait_until_their_share_is_free_in_order() -> None:
    memory = SoundMemory(100)
    first, second, third = (Caller(memory, size) for size in (60, 60, 10))
    await turn()
    assert (first.runs, second.runs, third.runs) == (True, False, False), "a small one does not pass a large one"
    assert (memory.held_bytes, memory.num_waiting) == (60, 2)
    await first.end()
    assert (second.runs, third.runs, memory.held_bytes) == (True, True, 70)
    await second.end()
    await third.end()
    assert (memory.held_bytes, memory.num_held, memory.num_waiting) == (0, 0, 0)


@pytest.mark.asyncio
async def test_a_file_larger_than_the_memory_gets_all_of_it() -> None:
    memory = SoundMemory(100)
    large = Caller(memory, 1000)
    await turn()
    assert (large.runs, memory.held_bytes) == (True, 100)
    await large.end()
    assert memory.held_bytes == 0


@pytest.mark.asyncio
async def test_tenants_take_turns() -> None:
    memory = SoundMemory(100, most_calls=1)
    running = Caller(memory, 1, "many")
    await turn()
    many = [Caller(memory, 1, "many") for _ in range(5)]
    await turn()
    one = Caller(memory, 1, "one")
    await turn()
    await running.end()
    assert many[0].runs, "it came first"
    await many[0].end()
    assert one.runs, "the other tenant waits for one file at most"
    await one.end()
    for call in many[1:]:
        assert call.runs
        await call.end()


@pytest.mark.asyncio
async def test_a_call_that_leaves_the_queue_lets_the_next_one_in() -> None:
    memory = SoundMemory(100)
    first, large, small = (Caller(memory, size) for size in (60, 100, 40))
    await turn()
    assert not small.runs
    large.task.cancel()
    await turn()
    assert small.runs
    await first.end()
    await small.end()
    assert (memory.held_bytes, memory.num_waiting) == (0, 0)


@pytest.mark.asyncio
async def test_a_share_that_is_granted_to_a_cancelled_call_is_given_back() -> None:
    memory = SoundMemory(100)
    first, second = Caller(memory, 100), Caller(memory, 100)
    await turn()
    first.ends.set()
    await loop_turns()  # the share is granted before the waiting task runs
    second.task.cancel()
    await asyncio.gather(first.task, second.task, return_exceptions=True)
    assert (memory.held_bytes, memory.num_held) == (0, 0)


@pytest.mark.asyncio
async def test_the_deadlineends_the_wait() -> None:
    memory = SoundMemory(100)
    first = Caller(memory, 100)
    await turn()
    with pytest.raises(DeadlineExceeded, match="while other files were transcribed"):
        async with memory.held(1, deadline_s=asyncio.get_running_loop().time()):
            pass
    assert memory.num_waiting == 0
    await first.end()


@pytest.mark.asyncio
async def test_random_calls_never_exceed_the_bound_and_leave_nothing() -> None:
    memory, rng = SoundMemory(1000, most_calls=8), random.Random(5)
    calls: list[Caller] = []
    for _ in range(3000):
        match rng.randrange(3):
            case 0:
                calls.append(Caller(memory, rng.randrange(1, 1500), rng.choice("abc")))
            case 1 if calls:
                calls.pop(rng.randrange(len(calls))).task.cancel()
            case _ if running := [call for call in calls if call.runs]:
                await running[0].end()
                calls.remove(running[0])
        await turn()
        assert memory.held_bytes <= 1000
        assert memory.num_held <= 8
        assert memory.num_held == sum(call.runs for call in calls)
    for call in calls:
        call.task.cancel()
    await turn()
    assert (memory.held_bytes, memory.num_held, memory.num_waiting) == (0, 0, 0)
