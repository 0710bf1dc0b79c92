"""Pending groups wait for a bounded time, not counting time in which the process was suspended."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from quire.services.frontend.scheduler_client.pending_queue import Group, PendingQueue


def group_of(name: str) -> Any:
    """Returns a group of plain objects; the queue only compares identities."""
    return (name,)


async def test_a_group_whose_wait_is_over_is_reported_once() -> None:
    told: asyncio.Queue[Group] = asyncio.Queue()
    queue = PendingQueue(told.put_nowait)
    queue.add(group_of("a"), 0.01, 1.0)
    assert await asyncio.wait_for(told.get(), 60) == group_of("a")
    assert len(queue) == 0
    assert told.empty()


async def test_a_suspension_does_not_use_up_the_wait() -> None:
    """Sessions that broke during a suspension reconnect in a few loop iterations, and the group is still pending."""
    told: list[Group] = []
    queue = PendingQueue(told.append, late_s=0.2, second_wait_s=60.0)
    queue.add(group_of("a"), 0.1, 1.0)
    time.sleep(0.5)  # noqa: ASYNC251 - the standstill
    await asyncio.sleep(0.05)
    assert told == []
    assert queue.take_all() == [group_of("a")]


async def test_a_stall_is_tolerated_for_a_bounded_time() -> None:
    told: asyncio.Queue[Group] = asyncio.Queue()
    PendingQueue(told.put_nowait, late_s=0.2, second_wait_s=0.01).add(group_of("a"), 0.1, 1.0)
    time.sleep(0.5)  # noqa: ASYNC251 - the standstill
    assert await asyncio.wait_for(told.get(), 60) == group_of("a")


async def test_waits_are_extended_when_a_scheduler_connects_within_a_maximum() -> None:
    told: asyncio.Queue[Group] = asyncio.Queue()
    queue, loop = PendingQueue(told.put_nowait), asyncio.get_running_loop()
    began_s = loop.time()
    queue.add(group_of("a"), 0.9, 1.0)  # each extension asks for more than the maximum
    while told.empty():
        queue.extend_waits(0.9)
        await asyncio.sleep(0.01)
    assert loop.time() - began_s >= 1.0 - 0.01
