"""Timing of a worker's steps, with a manual clock and simulated results."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

import pytest
from prometheus_client import CollectorRegistry

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.replica import Replica
from quire.services.scheduler.values.payload import Payload
from quire.shared.columns import i32_bytes
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.conftest import make_limits, make_sequence

STEP_S = 0.1


class ReplicaHarness:
    """A clock, and a worker that takes `STEP_S` for each step."""

    def __init__(self) -> None:
        self.now = 0.0
        self.plans: list[tuple[float, pb.StepPlan]] = []
        self._ends = 0.0  # of the worker's last step
        self._numbers = itertools.count()
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self.replica = Replica(
            pb.WorkerHello(
                worker_id="w0", model=model_pb2.ModelIdentity(vocab_size=100), limits=pb.StepLimits(max_num_seqs=8)
            ),
            1,
            Core(make_limits(num_blocks=100, max_steps_in_flight=0, max_num_seqs=8)),
            send=self._send,
            deliver=lambda _: None,
            clock=lambda: self.now,
            call_soon=lambda call: self.later(0, call),
            call_later=self.later,
            metrics=SchedulerMetrics(CollectorRegistry()),
            changes=BlockChanges(),
        )

    def ask(self, key: int) -> None:
        payload = Payload(b"")
        self.replica.add(make_sequence(key, list(range(10)), max_tokens=100, payload=payload))

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        heapq.heappush(self._due, (self.now + seconds, next(self._numbers), call))

    def run(self, until: float) -> None:
        while self._due and self._due[0][0] <= until:
            self.now, _, call = heapq.heappop(self._due)
            call()
        self.now = until

    def _send(self, message: pb.AttachResponse) -> None:
        self.plans.append((self.now, message.plan))
        self._ends = max(self.now, self._ends) + STEP_S
        self.later(self._ends - self.now, lambda: self._return(message.plan.step_id))

    def _return(self, step_id: int) -> None:
        flight = self.replica.core.steps_in_flight[0]
        tokens = i32_bytes([5] * len(flight.slots))
        self.replica.apply_result(pb.StepResult(epoch=1, step_id=step_id, token_ids=tokens))


@pytest.fixture
def loop() -> ReplicaHarness:
    return ReplicaHarness()


def test_new_sequences_are_in_the_step_after_the_one_in_flight(loop: ReplicaHarness) -> None:
    loop.ask(0)
    loop.run(10 * STEP_S + 0.05)
    loop.ask(1)
    loop.run(20 * STEP_S)
    admitted_at = next(at for at, plan in loop.plans if any(each.sequence_key == 1 for each in plan.admitted))
    assert admitted_at == pytest.approx(10 * STEP_S + 0.08, abs=0.002)


def test_the_worker_never_waits_for_a_plan(loop: ReplicaHarness) -> None:
    loop.ask(0)
    loop.run(40 * STEP_S + 0.01)
    assert 41 <= len(loop.plans) <= 42
    for number, (sent_at, _) in enumerate(loop.plans):
        assert sent_at <= number * STEP_S + 1e-9


def test_a_detached_worker_gets_no_steps(loop: ReplicaHarness) -> None:
    loop.ask(0)
    loop.run(10 * STEP_S + 0.05)
    loop.replica.pause()
    before = len(loop.plans)
    loop.run(10 * STEP_S + 0.09)
    assert len(loop.plans) == before


def test_a_worker_paused_twice_must_be_resumed_twice(loop: ReplicaHarness) -> None:
    loop.ask(0)
    loop.run(10 * STEP_S + 0.05)
    loop.replica.pause()
    loop.replica.pause()
    before = len(loop.plans)
    loop.replica.resume()
    loop.run(20 * STEP_S)
    assert len(loop.plans) == before
    loop.replica.resume()
    loop.run(21 * STEP_S)
    assert len(loop.plans) > before
