"""One request is prepared per event loop iteration, after refusals."""

from __future__ import annotations

import asyncio

import pytest

from quire.services.frontend.calls import preparation_queue
from quire.services.frontend.calls.preparation_queue import PreparationQueue
from tests.waiting import loop_turns


async def test_one_in_each_turn_of_the_loop_in_order() -> None:
    passing, order = PreparationQueue(), []
    num_turns = 0

    async def come(number: int) -> None:
        await passing.wait_turn()
        order.append((number, num_turns))

    tasks = [asyncio.create_task(come(number)) for number in range(5)]
    while not all(task.done() for task in tasks):
        num_turns += 1
        await loop_turns()
    assert [number for number, _ in order] == list(range(5))
    assert len({turn for _, turn in order}) == 5, "no two calls share a turn"


async def test_a_single_request_need_not_wait() -> None:
    passing = PreparationQueue()
    for _ in range(3):
        coming = passing.wait_turn()
        with pytest.raises(StopIteration):
            coming.send(None)
        await loop_turns(2)


async def test_a_cancelled_waiter_does_not_block_others() -> None:
    passing = PreparationQueue()
    await passing.wait_turn()
    tasks = [asyncio.create_task(passing.wait_turn()) for _ in range(3)]
    await loop_turns()
    tasks[0].cancel()
    async with asyncio.timeout(60):
        await asyncio.gather(*tasks[1:])
        await loop_turns()
        await passing.wait_turn()


async def test_refusals_come_first_but_not_for_ever() -> None:
    now = [100.0]
    passing = PreparationQueue(lambda: now[0])
    _, waiting = [asyncio.create_task(passing.wait_turn()) for _ in range(2)]
    for _ in range(10):
        await loop_turns()
        passing.note_refusal()
    assert not waiting.done()
    now[0] += 2 * preparation_queue.REFUSALS_FIRST_S
    for _ in range(4):
        passing.note_refusal()
        await loop_turns()
    assert waiting.done(), "refusals do not starve admitted calls"
