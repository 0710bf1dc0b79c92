from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Iterator
from typing import TypeVar

import pytest

from quire.services.scheduler.cluster.cluster import WorkerCluster
from tests.observing import calls_of
from tests.services.scheduler.scripted_peers import WorkerPeer

T = TypeVar("T")


class PauseRecorder:
    """Operator calls while steps are in flight."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()

    def record_paused(self, held: bool) -> None:
        if held:
            self.begun.set()

    async def meet(self, peer: WorkerPeer, asked: Awaitable[T]) -> T:
        """Returns the answer to a call made while a worker stands still; the worker continues once the scheduler has
        paused its workers."""
        self.begun.clear()
        answer = asyncio.ensure_future(asked)
        await asyncio.wait([answer, begun := asyncio.ensure_future(self.begun.wait())], return_when="FIRST_COMPLETED")
        begun.cancel()
        peer.go_on()
        return await answer


@pytest.fixture
def holding() -> Iterator[PauseRecorder]:
    seen, names = PauseRecorder(), [*inspect.signature(WorkerCluster.set_paused).parameters]
    with calls_of(WorkerCluster.set_paused, on_return=lambda call: seen.record_paused(bool(call.arguments[names[-1]]))):
        yield seen
