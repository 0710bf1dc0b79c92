"""A long-lived task ends only when asked to; any other end restarts it or ends the process."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from quire.shared.errors import FailedPrecondition, Internal
from quire.shared.process import supervision
from quire.shared.process.supervision import RestartBackoff, Tasks, cancellable_sleep, run_restarting, run_vital
from tests.waiting import eventually, forever

SHORT = RestartBackoff(0.001, 0.002)


async def returns() -> None:
    pass


async def fails() -> None:
    raise ValueError("no")


async def is_cancelled_from_within() -> None:
    raise asyncio.CancelledError


async def awaits_what_is_cancelled() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.cancel()
    await future


ENDS = [returns, fails, is_cancelled_from_within, awaits_what_is_cancelled]


@pytest.mark.parametrize("end", ENDS)
async def test_a_task_that_ends_in_any_way_starts_again(end: Callable[[], Awaitable[None]]) -> None:
    num_starts = 0
    steady = asyncio.Event()

    async def work() -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts <= 3:
            await end()
            return
        steady.set()
        await forever()

    task = asyncio.ensure_future(run_restarting("work", work, backoff=SHORT))
    await asyncio.wait_for(steady.wait(), 60)
    assert num_starts == 4
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("end", ENDS)
async def test_a_task_that_does_not_stay_up_ends_the_process_with_a_reason(end: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(Internal, match="work ended 11 times in a row"):
        await run_restarting("work", end, backoff=SHORT)


async def test_a_task_that_others_can_do_without_is_tried_for_ever() -> None:
    tried = asyncio.Event()
    num_starts = 0

    async def work() -> None:
        nonlocal num_starts
        num_starts += 1
        if num_starts > 3 * supervision.MAX_RESTARTS:
            tried.set()
        raise ValueError("no")

    task = asyncio.ensure_future(run_restarting("work", work, is_needed=False, backoff=SHORT))
    await asyncio.wait_for(tried.wait(), 60)
    assert not task.done()
    task.cancel()


async def test_what_no_restart_can_mend_is_raised() -> None:
    async def misfit() -> None:
        raise FailedPrecondition("another model")

    with pytest.raises(FailedPrecondition, match="another model"):
        await run_restarting("work", misfit, backoff=SHORT)


@pytest.mark.parametrize("end", [returns, is_cancelled_from_within, awaits_what_is_cancelled])
async def test_a_vital_task_must_not_just_end(end: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(Internal, match=r"work .*unexpectedly"):
        await run_vital("work", end())


async def test_a_vital_task_may_end_when_it_is_time() -> None:
    asked: list[bool] = []

    def may_end() -> bool:
        asked.append(True)
        return True

    await run_vital("work", returns(), may_end=may_end)
    assert asked == [True]


async def test_a_pause_ends_what_was_cancelled_in_vain_before() -> None:
    begins = asyncio.Event()

    async def rounds() -> None:
        while True:
            begins.set()
            try:
                await forever()
            except asyncio.CancelledError:
                begins.clear()
            await cancellable_sleep(0)

    task = asyncio.ensure_future(rounds())
    await begins.wait()
    task.cancel()
    await asyncio.wait([task], timeout=60)
    assert task.cancelled()


async def test_tasks_end_with_their_owner() -> None:
    tasks = Tasks()
    sleeper = tasks.start("sleeper", forever())
    tasks.start("short", returns())
    await eventually(lambda: len(tasks) == 1)
    await tasks.close()
    assert sleeper.cancelled()
    assert len(tasks) == 0
