"""Long-lived tasks end only when they are asked to. Any other end starts them again, or ends the process with a reason.

A CancelledError that nobody asked for is an end like any other: grpc.aio raises one from a write after the call was
cancelled on this side, and a loop that lets it pass is gone without a word.
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
LONGEST_PAUSE_S = 5.0
STEADY_S = 30.0  # a task that ran so long starts again with the first pause
MOST_RESTARTS = 10  # in a row, none of them steady: 25 s of trying

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class RestartBackoff:
    """Before a task starts again, in seconds: each twice as long as the one before."""

    first_s: float = FIRST_PAUSE_S
    longest_s: float = LONGEST_PAUSE_S


RESTART_BACKOFF = RestartBackoff()


def is_cancel_requested() -> bool:
    """Whether somebody has cancelled the current task, as opposed to something that it awaits."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def cancellable_sleep(seconds: float) -> None:
    """Sleeps between the rounds of a task that goes on until it is cancelled; ends it also where that was lost before.

    Until Python 3.12 wait_for(), in which Redis's client sends, loses one that comes as what it waits for ends.
    """
    if is_cancel_requested():
        raise asyncio.CancelledError
    await asyncio.sleep(seconds)


async def run_vital(name: str, work: Awaitable[None], may_end: Callable[[], bool] = lambda: False) -> None:
    """Raises what `work` raises, and Internal where it just ends though not `may_end()`: nothing works without it."""
    try:
        await work
    except asyncio.CancelledError:
        if is_cancel_requested():
            raise
        raise Internal(f"{name} was cancelled, and nobody here asked for that") from None
    if not may_end():
        raise Internal(f"{name} ended, and nobody asked for that")


async def run_restarting(
    name: str,
    work: Callable[[], Awaitable[object]],
    *,
    is_needed: bool = True,
    backoff: RestartBackoff = RESTART_BACKOFF,
) -> NoReturn:
    """Runs `work` for ever. Raises FailedPrecondition of it, which no restart can mend, and Internal when it does not
    stay up and `is_needed`: where the process is of use without it, it is tried on."""
    loop = asyncio.get_running_loop()
    num_restarts = 0
    while True:
        began_s = loop.time()
        reason = await _end_of(work)
        if loop.time() - began_s >= STEADY_S:
            num_restarts = 0
        if is_needed and num_restarts == MOST_RESTARTS:
            raise Internal(f"{name} ended {num_restarts + 1} times in a row, the last time because {reason}")
        pause_s = min(backoff.first_s * 2**num_restarts, backoff.longest_s)
        num_restarts = min(num_restarts + 1, MOST_RESTARTS)
        log.error("a task ended and starts again", task=name, reason=reason, pause_s=pause_s)
        await asyncio.sleep(pause_s)


async def _end_of(work: Callable[[], Awaitable[object]]) -> str:
    """Why `work` ended."""
    try:
        await work()
    except FailedPrecondition:
        raise
    except asyncio.CancelledError:
        if is_cancel_requested():
            raise
        return "it was cancelled, and nobody here asked for that"
    except Exception as error:
        log.exception("a task failed")
        return f"{type(error).__name__}: {error}"
    return "it returned"


class Tasks:
    """Tasks of one owner, who ends them by close() or hears of their ends. A failure is in the log for those who look
    closer; a cancellation that nobody asked for is an error there."""

    def __init__(self) -> None:
        self.running: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self.running)

    def start(self, name: str, work: Coroutine[Any, Any, Result]) -> asyncio.Task[Result]:
        task = asyncio.create_task(work, name=name)
        self.running.add(task)
        task.add_done_callback(self._on_end)
        return task

    def _on_end(self, task: asyncio.Task[Any]) -> None:
        self.running.discard(task)
        if task.cancelled():
            if not task.cancelling():
                log.error("a task was cancelled, and nobody asked for that", task=task.get_name())
        elif (error := task.exception()) is not None:
            log.debug("a task failed", task=task.get_name(), reason=f"{type(error).__name__}: {error}")

    async def close(self) -> None:
        """Returns when all have ended."""
        tasks = list(self.running)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
