"""A worker's sequences and state after the end of its session, for every way that it can end."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.operations.reconciler import WorkerReconciler
from quire.services.scheduler.operations.weight_streams import WeightStreams
from quire.services.scheduler.sessions.encode_session import ENCODE_TIMING, EncodeTiming
from quire.services.scheduler.sessions.worker_balancer import WorkerBalancer
from quire.services.scheduler.sessions.worker_service import WorkerService
from quire.shared import columns
from quire.shared.kv import block_hash
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.prefix_index import SchedulerEntry
from quire.shared.process.garbage import Collector
from quire.shared.rpc import worker_hello
from quire.shared.rpc.trust import HandshakeAcceptor
from quire.shared.settings import SchedulerSettings
from tests.services.scheduler.scripted_peers import MODEL, layout
from tests.waiting import eventually, loop_turns

OWNER = 1
HELLO = pb.WorkerHello(
    worker_id="w0",
    model=MODEL,
    layout=layout(),
    kv_cache=pb.KVCache(num_blocks=64),
    limits=pb.StepLimits(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=200),
)


class Aborted(Exception):
    """Abort of the call."""


class FakeCall:
    """The scheduler's end of an Attach call whose worker has sent its hello and skips orders."""

    def __init__(self, service: WorkerService, hello: pb.WorkerHello = HELLO) -> None:
        self._told: asyncio.Queue[Any] = asyncio.Queue()
        self._told.put_nowait(pb.AttachRequest(hello=hello))
        self.ordered: list[pb.AttachResponse] = []
        self.task = asyncio.create_task(service.Attach(None, self))  # type: ignore[arg-type]

    async def send_initial_metadata(self, metadata: tuple[()]) -> None: ...

    async def read(self) -> Any:
        return await self._told.get()

    async def write(self, message: pb.AttachResponse) -> None:
        self.ordered.append(message)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise Aborted(f"{code.name}: {details}")

    def tell(self, message: pb.AttachRequest) -> None:
        self._told.put_nowait(message)

    def hang_up(self) -> None:
        self._told.put_nowait(grpc.aio.EOF)

    @property
    def has_plan(self) -> bool:
        return any(message.HasField("plan") for message in self.ordered)


class SessionHarness:
    """The worker side of a scheduler, with a frontend that submits."""

    def __init__(self, heartbeat_interval_ms: int = 1000, encode_timing: EncodeTiming = ENCODE_TIMING) -> None:
        settings = SchedulerSettings(id="s0", grpc_port=0, metrics_port=0, heartbeat_interval_ms=heartbeat_interval_ms)
        metrics = SchedulerMetrics(CollectorRegistry())
        self.cluster = WorkerCluster(settings, asyncio.get_running_loop().time, metrics)
        self.cluster.add_frontend(OWNER, lambda _: None)
        self.collector = Collector()
        self.later: FakeCall | None = None
        self.service = WorkerService(
            settings,
            self.cluster,
            metrics,
            HandshakeAcceptor(None, "scheduler s0"),
            on_change=lambda: None,
            on_garbage=self.collector.request_collection,
            directory=None,
            reconciler=WorkerReconciler(self.cluster, asyncio.Lock()),
            streams=WeightStreams(),
            encode_timing=encode_timing,
        )

    def submit(self, sequence_id: int) -> None:
        prompt = list(range(sequence_id, sequence_id + 20))
        submission = scheduler_pb2.Submission(
            first_sequence_id=sequence_id,
            num_sequences=1,
            token_ids=columns.i32_bytes(prompt),
            num_prompt_tokens=len(prompt),
            root_hash=block_hash.root_hash(),
            max_tokens=8,
        )
        for _ in self.cluster.submit(OWNER, submission):
            pass


End = Callable[[FakeCall, SessionHarness], Awaitable[None]]


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        await eventually(holds)


async def test_sequences_of_a_cancelled_call_move_to_a_worker_attaching_meanwhile() -> None:
    desk = SessionHarness()
    first = FakeCall(desk.service)
    desk.submit(1)
    await until(lambda: first.has_plan)
    first.task.cancel()
    second = FakeCall(desk.service)
    await until(lambda: second.has_plan)
    assert desk.cluster.num_running == 1
    second.task.cancel()
    await asyncio.gather(first.task, second.task, return_exceptions=True)


async def test_of_concurrent_calls_of_one_worker_the_last_one_wins() -> None:
    desk = SessionHarness()
    calls = [FakeCall(desk.service)]
    desk.submit(1)
    await until(lambda: calls[0].has_plan)
    calls += [FakeCall(desk.service) for _ in range(3)]
    await until(lambda: calls[-1].has_plan)
    ends = await asyncio.gather(*(call.task for call in calls[:-1]), return_exceptions=True)
    assert ["attached again" in str(end) for end in ends] == [True] * 3
    assert desk.cluster.num_running == 1
    calls[-1].task.cancel()
    await asyncio.gather(calls[-1].task, return_exceptions=True)


def of_process(pid: int) -> pb.WorkerHello:
    hello = pb.WorkerHello(pid=pid, address=f"127.0.0.1:{pid}")
    hello.MergeFrom(HELLO)
    return hello


async def speaks_until(call: FakeCall, holds: Callable[[], bool]) -> None:
    def turn() -> bool:
        call.tell(pb.AttachRequest(heartbeat=pb.Heartbeat()))
        return holds()

    await until(turn)


async def test_a_second_process_with_the_same_id_is_refused_while_the_first_is_alive() -> None:
    desk = SessionHarness(heartbeat_interval_ms=100)
    first = FakeCall(desk.service, of_process(1))
    desk.submit(1)
    await speaks_until(first, lambda: first.has_plan)
    replica = desk.cluster.replicas["w0"]
    second = FakeCall(desk.service, of_process(2))
    await speaks_until(first, second.task.done)
    with pytest.raises(Aborted) as refused:
        await second.task
    assert str(refused.value) == (
        "FAILED_PRECONDITION: worker_id: 'w0' is attached and alive, as process 1 at '127.0.0.1:1'; process 2 at "
        "'127.0.0.1:2' needs another id (setting id)"
    )
    assert desk.cluster.replicas["w0"] is replica
    first.task.cancel()
    await asyncio.gather(first.task, return_exceptions=True)


@pytest.mark.parametrize("end", [lambda call: call.hang_up(), lambda _: None], ids=["closed", "silent"])
async def test_a_second_process_with_the_same_id_attaches_after_the_first_is_gone(
    end: Callable[[FakeCall], None],
) -> None:
    desk = SessionHarness(heartbeat_interval_ms=100)
    first = FakeCall(desk.service, of_process(1))
    desk.submit(1)
    await speaks_until(first, lambda: first.has_plan)
    second = FakeCall(desk.service, of_process(2))
    end(first)
    await until(lambda: second.has_plan)
    assert desk.cluster.num_running == 1
    second.task.cancel()
    await asyncio.gather(first.task, second.task, return_exceptions=True)


@pytest.mark.parametrize("redirected", [False, True], ids=["of its own", "sent by a peer"])
async def test_a_draining_scheduler_redirects_new_workers(redirected: bool) -> None:
    desk, stays = SessionHarness(), SchedulerEntry("s1", "s1:1", 1, 9)
    desk.service.balancer = WorkerBalancer(lambda: [SchedulerEntry("s2", "s2:1", 1, 0, draining=True), stays])
    desk.cluster.draining = True
    hello = pb.WorkerHello(redirected=redirected)
    hello.MergeFrom(HELLO)
    call = FakeCall(desk.service, hello)
    await call.task
    assert [message.redirect.address for message in call.ordered] == [stays.address]
    assert not desk.cluster.replicas


async def test_a_worker_built_before_the_fields_of_a_hello_were_grouped_attaches() -> None:
    older = pb.WorkerHello()
    older.CopyFrom(HELLO)
    worker_hello.add_ungrouped(older)
    for group in worker_hello.GROUPS:
        older.ClearField(group)  # type: ignore[arg-type]
    desk = SessionHarness()
    call = FakeCall(desk.service, older)
    await until(lambda: bool(desk.cluster.replicas))
    (replica,) = desk.cluster.replicas.values()
    assert (replica.core.limits.num_blocks, replica.core.limits.max_num_seqs) == (64, 4)
    assert replica.hello.limits == HELLO.limits
    call.task.cancel()
    await asyncio.gather(call.task, return_exceptions=True)


async def cancelled(call: FakeCall, _desk: SessionHarness) -> None:
    call.task.cancel()


async def hung_up(call: FakeCall, _desk: SessionHarness) -> None:
    call.hang_up()


async def superseded(_call: FakeCall, desk: SessionHarness) -> None:
    desk.later = FakeCall(desk.service)


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Disables automatic garbage collection."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def kept_after(end: End, desk: SessionHarness) -> list[weakref.ref[object]]:
    """Returns weak references to a worker's state after the end of its session."""
    call = FakeCall(desk.service)
    desk.submit(1)
    await until(lambda: call.has_plan)
    replica = desk.cluster.replicas["w0"]
    await end(call, desk)
    await until(lambda: desk.cluster.replicas.get("w0") is not replica)
    await asyncio.gather(call.task, return_exceptions=True)
    return [weakref.ref(part) for part in (replica, replica.core, replica.core.state, replica.core.kv.pool)]


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("end", [cancelled, hung_up, superseded])
async def test_state_of_a_worker_is_collected_after_its_session(end: End) -> None:
    """It must not take minutes: with 2,000 blocks it is 335 KiB for each worker that attached and left until then."""
    desk = SessionHarness()
    kept = await kept_after(end, desk)
    await loop_turns()  # the loop itself still has the last callbacks
    desk.collector.look()
    assert [part() for part in kept] == [None] * len(kept)
    if desk.later is not None:
        desk.later.task.cancel()
        await asyncio.gather(desk.later.task, return_exceptions=True)
