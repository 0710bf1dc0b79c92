"""One request is prepared per event loop iteration, clients take turns, and refusals go first."""

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


@pytest.mark.parametrize("num_before", [1, 63, 4096])
async def test_a_request_of_another_client_does_not_wait_for_a_burst(num_before: int) -> None:
    queue, order = PreparationQueue(), []

    async def come(client: str) -> None:
        await queue.wait_turn(client)
        order.append(client)

    burst = [asyncio.create_task(come("burst")) for _ in range(num_before + 1)]
    await loop_turns()  # the first one has its turn, the others wait
    others = [asyncio.create_task(come(client)) for client in ("one", "two")]
    for _ in range(8):
        await loop_turns()
    assert [client for client in order if client != "burst"] == ["one", "two"]
    assert order.index("two") <= 4, "each client's first request is served after one of the burst at most"
    await asyncio.gather(*burst, *others)
    assert queue.num_waiting == 0


async def test_requests_of_one_client_keep_their_order_between_others() -> None:
    queue, order = PreparationQueue(), []

    async def come(client: str, number: int) -> None:
        await queue.wait_turn(client)
        order.append((client, number))

    async with asyncio.TaskGroup() as group:
        for number in range(9):
            group.create_task(come("ab"[number % 2], number))
    for client in "ab":
        assert [number for name, number in order if name == client] == sorted(n for name, n in order if name == client)


async def test_refusals_of_one_client_do_not_hold_back_another() -> None:
    queue = PreparationQueue(lambda: 100.0)
    _, refused, other = [asyncio.create_task(queue.wait_turn(client)) for client in ("flood", "flood", "other")]
    for _ in range(4):
        queue.note_refusal("flood")
        await loop_turns()
    assert other.done()
    assert not refused.done(), "its own refusals go first"
    await loop_turns(3)
    assert refused.done()


async def test_a_client_whose_waiters_were_all_cancelled_is_forgotten() -> None:
    queue = PreparationQueue()
    _, *gone, kept = [asyncio.create_task(queue.wait_turn(client)) for client in ("x", "gone", "gone", "gone", "kept")]
    await loop_turns()
    for task in gone:
        task.cancel()
    await loop_turns(3)
    assert kept.done()
    await loop_turns(2)
    assert queue.num_waiting == 0
