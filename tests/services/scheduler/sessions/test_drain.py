"""Drain of a scheduler while a worker computes, is lost, or the other schedulers disappear."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest_asyncio

from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.sessions.drain import drain
from quire.services.scheduler.sessions.frontend_service import FrontendService
from quire.services.scheduler.sessions.worker_balancer import WorkerBalancer
from quire.shared.columns import i32_bytes
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.prefix_index import SchedulerEntry
from quire.shared.rpc.trust import HandshakeAcceptor
from quire.shared.settings import SchedulerSettings
from tests.services.scheduler.sessions.test_worker_service import OWNER, FakeCall, SessionHarness, until

HEIR = SchedulerEntry("s1", "s1:1", 1, 0)
LONG_S = 3600


class DrainHarness:
    """A scheduler that has started to drain while its worker computes."""

    def __init__(self) -> None:
        self.peers = [HEIR]
        self.desk = SessionHarness()
        self.call = FakeCall(self.desk.service)
        self._num_answered = 0

    async def begin(self) -> None:
        self.desk.submit(1)
        await until(lambda: self.call.has_plan)
        self.replica = self.desk.cluster.replicas["w0"]
        settings = SchedulerSettings(id="s0", grpc_port=0, metrics_port=0, drain_timeout_s=LONG_S)
        frontends = FrontendService(settings, self.desk.cluster, HandshakeAcceptor(None, "scheduler s0"))
        self.task = asyncio.create_task(
            drain(settings, self.desk.cluster, frontends, WorkerBalancer(lambda: self.peers))
        )
        await until(lambda: self.replica.leaving)
        assert self.replica.busy

    def answer(self) -> None:
        """Returns the results of all planned steps, one token each."""
        plans = [message.plan for message in self.call.ordered if message.HasField("plan")]
        for plan in plans[self._num_answered :]:
            result = pb.StepResult(epoch=self.replica.epoch, step_id=plan.step_id, token_ids=i32_bytes([5]))
            self.call.tell(pb.AttachRequest(result=result))
        self._num_answered = len(plans)

    def answers_until(self, holds: Callable[[], bool]) -> Callable[[], bool]:
        return lambda: (self.answer(), holds())[1]

    async def end(self) -> None:
        for task in (self.task, self.call.task):
            task.cancel()
        await asyncio.gather(self.task, self.call.task, return_exceptions=True)


@pytest_asyncio.fixture
async def leaving() -> AsyncIterator[DrainHarness]:
    one = DrainHarness()
    await one.begin()
    yield one
    await one.end()


async def test_a_worker_is_redirected_when_its_steps_have_returned(leaving: DrainHarness) -> None:
    leaving.answer()
    await until(lambda: leaving.call.task.done() or leaving.call.ordered[-1].HasField("redirect"))
    assert leaving.call.ordered[-1].redirect.address == HEIR.address


async def test_steps_of_a_lost_worker_are_not_waited_for(leaving: DrainHarness) -> None:
    leaving.call.hang_up()
    await until(lambda: not leaving.desk.cluster.replicas)
    leaving.desk.cluster.cancel(OWNER, [1], Reason.CANCELLED)
    await until(leaving.task.done)
    assert leaving.desk.cluster.idle


async def test_without_peers_running_sequences_finish(leaving: DrainHarness) -> None:
    leaving.peers = []
    await until(leaving.answers_until(leaving.task.done))
    assert leaving.desk.cluster.idle
