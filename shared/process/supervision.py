"""Supervision of long-lived tasks: a task that ends unexpectedly is restarted, or ends the process with a reason.

An unrequested CancelledError counts as an unexpected end: grpc.aio raises one from a write after the call was
cancelled locally, which would end a loop silently.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from quire.shared.errors import FailedPrecondition, Internal
from quire.shared.logs import logger

log = logger("supervision")

FIRST_PAUSE_S = 0.05
MAX_PAUSE_S = 5.0
STEADY_S = 30.0  # after this run time the pauses start over
MAX_RESTARTS = 10  # consecutive restarts without a steady run: 25 s in all

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Pauses before restarts, in seconds; each is twice as long as the previous one."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = MAX_PAUSE_S


RESTART_BACKOFF = RestartBackoff()


def is_cancel_requested() -> bool:
    """Whether the current task itself was cancelled, as opposed to something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancellable_sleep(seconds: float) -> None:
    """Sleeps between the rounds of an endless task, and raises a cancellation that was lost earlier.

    Until Python 3.12 wait_for(), which Redis's client uses, loses a cancellation that arrives as its awaitable
    finishes.
    """
    if is_cancel_requested():
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


async def run_vital(name: str, work: Awaitable[None], may_end: Callable[[], bool] = lambda: False) -> None:
    """Runs `work`, without which the process is useless. Raises what it raises, and Internal if it ends while
    `may_end()` is false."""
    try:
        await work
    except asyncio.CancelledError:
        if is_cancel_requested():
            raise
        raise Internal(f"{name} was cancelled unexpectedly") from None
    if not may_end():
        raise Internal(f"{name} ended unexpectedly")


async def run_restarting(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    is_needed: bool = True,
    backoff: RestartBackoff = RESTART_BACKOFF,
) -> NoReturn:
    """Runs `work` for ever, restarting it with growing pauses. Raises its FailedPrecondition, which a restart cannot
    fix, and Internal if it keeps failing and `is_needed`; otherwise restarts continue."""
    loop = asyncio.get_running_loop()
    num_restarts = 0
    while True:
        began_s = loop.time()
        reason = await _end_of(work)
        if loop.time() - began_s >= STEADY_S:
            num_restarts = 0
        if is_needed and num_restarts == MAX_RESTARTS:
            raise Internal(f"{name} ended {num_restarts + 1} times in a row, the last time because {reason}")
        pause_s = min(backoff.first_s * 2**num_restarts, backoff.longest_s)
        num_restarts = min(num_restarts + 1, MAX_RESTARTS)
        log.error("a background task ended and is restarted", task=name, reason=reason, pause_s=pause_s)
        await asyncio.sleep(pause_s)


async def _end_of(work: Callable[[], Awaitable[object]]) -> str:
    """Runs `work` and returns the reason why it ended, logging an exception. Raises its FailedPrecondition, and a
    cancellation that was requested."""
    try:
        await work()
    except FailedPrecondition:
        raise
    except asyncio.CancelledError:
        if is_cancel_requested():
            raise
        return "it was cancelled unexpectedly"
    except Exception as error:
        log.exception("a background task failed")
        return f"{type(error).__name__}: {error}"
    return "it returned"


class Tasks:
    """Tasks of one owner, which ends them by close(). Failures are logged at debug level, because the owner handles
    them; an unrequested cancellation is logged as an error."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self.running)

    def start(self, name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        """Starts a task and keeps a reference to it until it ends."""
        task = asyncio.create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        """Drops the reference to an ended task; logs its failure at debug level and an unrequested cancellation as
        an error."""
        self.running.discard(task)
        if task.cancelled():
            if not task.cancelling():
                log.error("a task was cancelled unexpectedly", task=task.get_name())
        elif (error := task.exception()) is not None:
            log.debug("a background task failed", task=task.get_name(), reason=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Cancels all tasks and waits until they have ended."""
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
