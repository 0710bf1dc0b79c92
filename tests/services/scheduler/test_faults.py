"""A submission that fails anywhere ends with an error, alone, and leaves nothing in the scheduler."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

import quire.services.scheduler
from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.codec import decode_failure
from quire.services.scheduler.replicas.replica import Replica
from quire.shared import columns
from quire.shared.kv import block_hash
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.common.v1.sampling_pb2 import BeamSearch, StructuredOutput
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.settings import SchedulerSettings
from tests.faults import Fault, Faults
from tests.services.scheduler.conftest import make_limits
from tests.services.scheduler.scripted_peers import MODEL
from tests.services.scheduler.test_service import Start, start  # noqa: F401 - a fixture

OWNER = 1
ERROR = finish_pb2.FINISH_REASON_ERROR
FORM = StructuredOutput(regex="[a-z]+")
WAYS: dict[str, dict[str, Any]] = {
    "one": {"max_tokens": 4},
    "three": {"max_tokens": 4, "num_sequences": 3},
    "a form": {"max_tokens": 4, "num_sequences": 2, "grammar": FORM.SerializeToString()},
    "a search": {"max_tokens": 4, "num_sequences": 2, "beam_search": BeamSearch(width=2)},
    "too long": {"max_tokens": 4, "prompt": 500},
    "a deadline": {"max_tokens": 4, "timeout_ms": 1000},
    "a query": {"samples_nothing": True, "late_query": pb.LateQuery(token_ids=columns.i32_bytes([1, 2, 3]))},
}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Suppresses the log: the tests cause hundreds of tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


class ClusterHarness:
    """A cluster with one worker whose steps are not executed, and the messages sent to its one frontend."""

    def __init__(self, *, has_worker: bool) -> None:
        settings = SchedulerSettings(id="s0", grpc_port=0, metrics_port=0)
        metrics = SchedulerMetrics(CollectorRegistry())
        self.cluster = WorkerCluster(settings, lambda: 0.0, metrics)
        self.cluster.terms.agree_on_model(MODEL, "a test")
        self.ended: list[tuple[int, int]] = []
        self._soon: list[Callable[[], None]] = []
        self.cluster.add_frontend(OWNER, self.take)
        self.replica: Replica | None = None
        self._metrics = metrics
        if has_worker:
            self.replica = self.attach("w0")

    def attach(self, name: str) -> Replica:
        limits = make_limits(num_blocks=64, max_model_len=200, max_num_seqs=4, num_query_vectors=100)
        replica = Replica(
            worker_pb2.WorkerHello(worker_id=name),
            1,
            Core(limits),
            send=lambda _: None,
            deliver=self.cluster.deliver,
            clock=lambda: 0.0,
            call_soon=self._soon.append,
            call_later=lambda _, call: None,
            metrics=self._metrics,
            changes=BlockChanges(),
        )
        replica.pause()
        self.cluster.attach(replica)
        return replica

    def take(self, message: pb.SessionResponse) -> None:
        self.ended += [(finished.sequence_id, finished.reason) for finished in message.tokens.finished]

    def submit(self, first_id: int, **asked: Any) -> None:
        prompt = list(range(asked.pop("prompt", 20)))
        tokens = [token % 50 for token in prompt]
        submission = pb.Submission(
            first_sequence_id=first_id,
            num_sequences=asked.pop("num_sequences", 1),
            token_ids=columns.i32_bytes(tokens),
            num_prompt_tokens=len(tokens),
            root_hash=block_hash.root_hash(),
            **asked,
        )
        for _ in self.cluster.submit(OWNER, submission):
            pass

    def run_soon(self) -> None:
        soon, self._soon[:] = self._soon[:], []
        for call in soon:
            call()

    def left(self) -> dict[str, Any]:
        """Returns the non-zero counts of state held for sequences."""
        cluster = self.cluster
        held: dict[str, Any] = {
            "places": len(cluster._live.of(OWNER)),
            "replica_of": cluster.assignments.num_placed,
            "unassigned": len(cluster.assignments.unassigned),
        }
        if self.replica is not None:
            core = self.replica.core
            held |= {
                "sequences": core.num_sequences,
                "waiting": core.num_waiting,
                "waiting tokens": core.num_waiting_tokens,
                "grammar users": core.grammars.num_users,
                "queries": len(core.queries),
                "vectors": core.queries.num_vectors,
                "computing": core.siblings.num_computing,
                "used": core.use.used,
            }
        return {kind: number for kind, number in held.items() if number}


@pytest.mark.parametrize("has_worker", [True, False], ids=["a worker", "no worker"])
@pytest.mark.parametrize("way", WAYS)
def test_a_fault_anywhere_in_a_submission_ends_it_alone(way: str, has_worker: bool) -> None:
    folder = Path(quire.services.scheduler.__file__).parent
    undone = {"WorkerCluster._fail", "LiveSequences.forget", "Assignments.drop"}
    gives_back = frozenset({*undone, "WaitingSequences.undo_enqueue", "WaitingSequences.leave_prerequisites"})
    elsewhere = ("/batches.py",)  # delivery to the frontend
    faults = Faults((folder,), not_in=gives_back, not_under=elsewhere)
    with faults.at(0):
        ClusterHarness(has_worker=has_worker).submit(10, **WAYS[way])
    num_calls = faults.num_calls
    assert num_calls > 20
    for number in range(1, num_calls + 1):
        desk = ClusterHarness(has_worker=has_worker)
        desk.submit(1, max_tokens=4)  # another sequence, which is not affected
        before = desk.left()
        with faults.at(number):
            desk.submit(10, **WAYS[way])
        count = WAYS[way].get("num_sequences", 1)
        desk.cluster.cancel(OWNER, range(10, 10 + count), Reason.CANCELLED)
        desk.run_soon()
        assert desk.left() == before, faults.where
        assert sorted(sequence_id for sequence_id, _ in desk.ended) == list(range(10, 10 + count)), faults.where


@pytest.mark.parametrize("waits", [True, False], ids=["unassigned", "with a worker that is lost"])
def test_a_fault_in_reassigning_a_sequence_ends_it_alone(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    desk, add = ClusterHarness(has_worker=not waits), Replica.add
    for first_id in (1, 2, 3):
        desk.submit(first_id, max_tokens=4)

    def fails_for_one(replica: Replica, sequence: Sequence) -> None:
        if sequence.sequence_id == 2:
            raise ValueError("some bug")
        add(replica, sequence)

    monkeypatch.setattr(Replica, "add", fails_for_one)
    other = desk.attach("w1")
    if desk.replica is not None:
        desk.cluster.detach(desk.replica, lost=True)
    assert desk.ended == [(2, ERROR)]
    assert other.core.num_sequences == desk.cluster.assignments.num_placed == 2
    assert len(desk.cluster.assignments.unassigned) == 0


@pytest.mark.parametrize(("lost", "level"), [(True, "WARNING"), (False, "INFO")])
def test_a_lost_worker_is_a_warning_in_the_log(caplog: pytest.LogCaptureFixture, lost: bool, level: str) -> None:
    caplog.set_level("INFO", logger="quire.cluster")
    desk = ClusterHarness(has_worker=True)
    assert desk.replica is not None
    desk.cluster.detach(desk.replica, lost=lost)
    assert [record.levelname for record in caplog.records if record.getMessage() == "worker detached"] == [level]


def test_an_unknown_error_code_is_an_internal_error() -> None:
    assert decode_failure(finish_pb2.Error(code=99, message="odd")).code == "INTERNAL"  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        ({"eos_token_ids": b"123"}, "a column of 3 bytes"),
        ({"block_hashes": b"short"}, "block_hashes: 5 bytes"),
        ({"token_ids": b"12345"}, "token_ids: 5 bytes"),
        ({"root_hash": b""}, "root_hash: 0 bytes"),
    ],
)
async def test_a_malformed_submission_ends_alone(start: Start, broken: dict[str, bytes], words: str) -> None:  # noqa: F811
    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    await frontend.submit(1, [7, 1, 3], max_tokens=4, **broken)
    await frontend.submit(2, [7, 1, 3], max_tokens=4)
    await frontend.ended(1, 2)
    assert frontend.finished[1].reason == ERROR
    assert frontend.finished[1].error.code == finish_pb2.ERROR_CODE_INVALID_ARGUMENT
    assert words in frontend.finished[1].error.message
    assert frontend.finished[2].reason != ERROR


async def test_a_malformed_cancellation_ends_its_session_with_a_reason(start: Start) -> None:  # noqa: F811
    bench = await start()
    await bench.worker()
    frontend, other = await bench.frontend(), await bench.frontend()
    await frontend.until(lambda: frontend.view.num_workers)
    frontend.link.send(pb.SessionRequest(cancellation=pb.Cancellation(sequence_ids=b"123")))
    assert await frontend.call.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "3 bytes" in await frontend.call.details()
    await asyncio.gather(frontend.session, return_exceptions=True)
    await other.submit(1, [7, 1, 3], max_tokens=4)
    await other.ended(1)


async def test_a_fault_of_a_session_is_reported_as_internal(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    def broken(*_: object) -> None:
        raise Fault

    bench = await start()
    await bench.worker()
    frontend = await bench.frontend()
    await frontend.until(lambda: frontend.view.num_workers)
    monkeypatch.setattr(WorkerCluster, "submit", broken)
    await frontend.submit(1, [7, 1, 3], max_tokens=4)
    assert await frontend.call.code() is grpc.StatusCode.INTERNAL
    assert await frontend.call.details() == "internal error: this session has ended"
    await asyncio.gather(frontend.session, return_exceptions=True)
