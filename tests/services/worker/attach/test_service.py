"""A whole worker over real gRPC, with a scheduler scripted by the test."""

from __future__ import annotations

import asyncio
import logging
import re
import sys
import threading
import urllib.request
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.services.worker.attach.attachment import Attachment
from quire.services.worker.attach.timing import WorkerTiming
from quire.services.worker.main import serve
from quire.services.worker.replica.replica import Replica
from quire.shared import columns, logs
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.kv import block_hash
from quire.shared.kv.block_hash import chain, root_hash, split
from quire.shared.models import model_identity
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.lifecycle import Shutdown
from quire.shared.rpc import worker_hello
from quire.shared.rpc.server import LIVENESS, NOT_SERVING, SERVING
from quire.shared.settings import WorkerSettings
from tests.admin import admin_of, calling
from tests.chaos.proxy import Proxy
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.plans import New, PaperScheduler
from tests.services.worker.rig import Rig
from tests.services.worker.scripted_scheduler import PATIENCE_S, ScriptedScheduler, Session
from tests.waiting import eventually

Make = Callable[[str], Checkpoint]
PROMPT = [3, 1, 4, 1, 5, 9]
SIZES = {"dtype": "float32", "block_size": 4, "num_blocks": 128, "max_num_seqs": 8, "threads": 1}


@dataclass
class RunningWorker:
    """`serve` as a task in the test's event loop."""

    task: asyncio.Task[None]
    shutdown: Shutdown
    capture: pytest.CaptureFixture[str]

    async def ends(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            await self.task

    async def addresses(self) -> tuple[str, str]:
        """Addresses of gRPC and of metrics, from the ready line on stdout."""
        printed: list[str] = []

        def line() -> re.Match[str] | None:
            printed.append(self.capture.readouterr().out)
            return re.search(r"quire-worker ready id=w grpc=(\S+) metrics=(\S+) admin=\S+\n", "".join(printed))

        found = await eventually(line)
        assert found is not None
        return found.group(1), found.group(2)


Start = Callable[..., RunningWorker]
QUICK = WorkerTiming(first_backoff_s=0.01)


@pytest.fixture
async def scheduler() -> AsyncIterator[ScriptedScheduler]:
    scripted = ScriptedScheduler()
    await scripted.start()
    yield scripted
    await scripted.stop()


@pytest.fixture
async def start(
    scheduler: ScriptedScheduler,
    checkpoint: Make,
    capsys: pytest.CaptureFixture[str],
) -> AsyncIterator[Start]:
    running: list[RunningWorker] = []
    handlers, interval = logging.getLogger().handlers[:], sys.getswitchinterval()

    def run(timing: WorkerTiming = QUICK, **settings: Any) -> RunningWorker:
        folder = str(checkpoint("llama").folder)
        values = {"id": "w", "model": folder, "scheduler": f"127.0.0.1:{scheduler.port}", **SIZES, **settings}
        shutdown = Shutdown()
        task = asyncio.ensure_future(serve(WorkerSettings(**values), shutdown, timing))
        running.append(RunningWorker(task, shutdown, capsys))
        return running[-1]

    yield run
    for worker in running:
        worker.task.cancel()
        await asyncio.gather(worker.task, return_exceptions=True)
    logging.getLogger().handlers[:] = handlers
    sys.setswitchinterval(interval)


async def finish(worker: RunningWorker, *sessions: Session) -> None:
    worker.shutdown.request()
    for session in sessions:
        await session.leaving()
        session.close()
    await worker.ends()


def expected_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    rig = Rig(folder)
    rig.step([New(0, prompt)], {0: len(prompt)})
    for _ in range(count - 1):
        rig.step()
    return rig.tokens(0)[len(prompt) :]


async def test_hello_describes_the_worker(start: Start, scheduler: ScriptedScheduler, checkpoint: Make) -> None:
    worker = start(served_model_name="small", max_model_len=100, max_logprobs=7)
    session, hello = await scheduler.attached(epoch=5)
    identity = model_identity.identity(checkpoint("llama").folder, "small")
    assert (hello.model, hello.model.vocab_size) == (identity, VOCAB_SIZE)
    assert (hello.layout.block_size, hello.layout.hash_scheme) == (4, block_hash.SCHEME)
    assert (hello.worker_id, hello.kv_cache.num_blocks, hello.limits.max_num_seqs) == ("w", 128, 8)
    assert (hello.limits.max_num_batched_tokens, hello.limits.max_model_len) == (2048, 100)
    assert hello.sampling.max_logprobs == 7
    assert (hello.last_epoch, hello.held.block_ids, hello.held.block_hashes) == (0, b"", b"")
    assert hello.device.startswith("cpu ")
    assert hello.address == (await worker.addresses())[0]
    older = pb.WorkerHello.FromString(hello.SerializeToString())
    for group in worker_hello.GROUPS:
        older.ClearField(group)  # type: ignore[arg-type]  # a scheduler built before the groups reads none
    worker_hello.group(older)
    assert older.limits == hello.limits
    await finish(worker, session)


async def test_plans_in_flight_give_results_in_order(
    start: Start, scheduler: ScriptedScheduler, checkpoint: Make
) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(2, PROMPT)], {2: 6}), paper.plan())
    for step_id in range(1, 9):
        result = await session.result()
        assert (result.epoch, result.step_id) == (5, step_id)
        paper.take(result)
        await session.plan(paper.plan())
    assert paper.rows[2].tokens[6:] == expected_tokens(checkpoint("llama").folder, PROMPT, 8)
    for _ in range(2):
        await session.result()
    await finish(worker, session)


async def test_worker_reattaches_with_its_blocks(start: Start, scheduler: ScriptedScheduler, checkpoint: Make) -> None:
    """The scheduler dies with a sequence in progress and is restarted on the same port."""
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, PROMPT)], {0: 6}))
    paper.take(await session.result())
    for _ in range(3):
        await session.plan(paper.plan())
        paper.take(await session.result())
    before = paper.rows[0]
    session.close()
    await scheduler.stop()
    await scheduler.start()
    session, hello = await scheduler.attached(epoch=9)
    assert hello.last_epoch == 5
    hashes = chain(root_hash(), columns.i32_bytes(before.tokens[:9]), 4)
    held = zip(columns.u32(hello.held.block_ids).tolist(), split(hello.held.block_hashes), strict=True)
    assert dict(held) == dict(zip(before.blocks, hashes, strict=False))

    again = PaperScheduler(4, 128, epoch=9)
    moved = New(0, before.tokens, num_prompt=6, cached_blocks=tuple(before.blocks[:2]))
    again.free = [block for block in again.free if block not in before.blocks]
    await session.plan(again.plan([moved], {0: 2}), again.plan())
    for _ in range(2):
        again.take(await session.result())
    assert again.rows[0].tokens[6:] == expected_tokens(checkpoint("llama").folder, PROMPT, 6)
    await finish(worker, session)


async def test_worker_reports_a_lost_connection(start: Start, scheduler: ScriptedScheduler) -> None:
    async def works(session: Session, epoch: int) -> None:
        await session.plan(PaperScheduler(4, 128, epoch=epoch).plan([New(0, PROMPT)], {0: 6}))
        await session.result()

    proxy = Proxy(f"127.0.0.1:{scheduler.port}")
    await proxy.start()
    try:
        worker = start(scheduler=f"127.0.0.1:{proxy.port}")
        session, hello = await scheduler.attached(epoch=5)
        assert not hello.connection_lost
        await works(session, 5)
        proxy.cut()
        session, hello = await scheduler.attached(epoch=6)
        assert (hello.last_epoch, hello.connection_lost) == (5, True)
        await works(session, 6)
        session.close()
        session, hello = await scheduler.attached(epoch=7)
        assert (hello.last_epoch, hello.connection_lost) == (6, False)
        await finish(worker, session)
    finally:
        await proxy.close()


def stale_epoch(plan: pb.StepPlan) -> None:
    plan.epoch -= 1


def gap(plan: pb.StepPlan) -> None:
    plan.step_id += 1


def slot_of_nobody(plan: pb.StepPlan) -> None:
    plan.released_slots = columns.u32_bytes([7])


def block_too_many(plan: pb.StepPlan) -> None:
    plan.new_block_ids += columns.u32_bytes([50])


@pytest.mark.parametrize(
    ("spoil", "text"),
    [
        (stale_epoch, "a plan of epoch 4 in epoch 5"),
        (gap, "received step 3, expected step 2"),
        (slot_of_nobody, "released slots are not live"),
        (block_too_many, "new_block_ids, but the slots lack"),
    ],
)
async def test_invalid_plan_ends_the_session_and_a_new_one_starts(
    start: Start, scheduler: ScriptedScheduler, spoil: Callable[[pb.StepPlan], None], text: str
) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, PROMPT)], {0: 6}))
    await session.result()
    plan = paper.plan()
    spoil(plan)
    await session.plan(plan)
    await session.ended()
    session, hello = await scheduler.attached(epoch=6)
    assert (hello.last_epoch, hello.connection_lost) == (5, False)
    logs.flush()
    assert text in worker.capture.readouterr().err
    fresh = PaperScheduler(4, 128, epoch=6)
    await session.plan(fresh.plan([New(0, PROMPT)], {0: 6}))
    assert (await session.result()).epoch == 6
    await finish(worker, session)


async def test_results_of_an_epoch_that_is_over_are_dropped(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, list(range(100)))], {0: 100}), *(paper.plan() for _ in range(20)))
    session.close()
    session, _ = await scheduler.attached(epoch=6)
    fresh = PaperScheduler(4, 128, epoch=6)
    await session.plan(fresh.plan([New(1, PROMPT)], {1: 6}))
    result = await session.result()
    assert (result.epoch, result.step_id) == (6, 1)
    await finish(worker, session)


async def test_a_cache_reset_empties_the_next_hello(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, PROMPT)], {0: 6}))
    await session.result()
    await session.cache_reset()
    session.close()
    session, hello = await scheduler.attached(epoch=6)
    assert hello.held.block_ids == b""
    await finish(worker, session)


async def test_a_leaving_worker_works_until_it_is_let_go(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    worker.shutdown.request()
    await session.leaving()
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, PROMPT)], {0: 6}))
    assert (await session.result()).step_id == 1
    assert not worker.task.done()
    session.close()
    await worker.ends()


async def test_a_worker_that_is_not_let_go_leaves_when_time_is_up(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start(drain_timeout_s=0.2)
    session, _ = await scheduler.attached(epoch=5)
    worker.shutdown.request()
    await session.leaving()
    await worker.ends()
    assert not session.over.is_set(), "nobody let it go"


async def test_worker_without_a_scheduler_retries_and_stops_on_request(
    start: Start, scheduler: ScriptedScheduler
) -> None:
    await scheduler.stop()
    worker = start()
    await eventually(lambda: "not attached" in worker.capture.readouterr().err)
    assert not worker.task.done(), "it tries on"
    worker.shutdown.request()
    await worker.ends()
    await scheduler.start()


async def test_refused_worker_ends_with_the_schedulers_reason(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start()
    session = await scheduler.dialled()
    await session.hello()
    session.refuse("block_size: the cluster has 16, worker w has 4")
    with pytest.raises(FailedPrecondition, match="block_size: the cluster has 16, worker w has 4"):
        await worker.ends()


async def test_an_attachment_that_is_refused_later_is_followed_by_another(
    start: Start, scheduler: ScriptedScheduler
) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    await session.plan(PaperScheduler(4, 128, epoch=5).plan([New(0, PROMPT)], {0: 6}))
    await session.result()
    session.refuse("this session is over")
    session, hello = await scheduler.attached(epoch=6)
    assert (hello.last_epoch, hello.connection_lost) == (5, False)
    await finish(worker, session)


async def test_a_wrong_folder_is_an_error_at_start(start: Start, tmp_path: Path) -> None:
    worker = start(model=str(tmp_path))
    with pytest.raises(InvalidArgument, match=r"no config\.json"):
        await worker.ends()


async def test_admin_health_and_metrics(start: Start, scheduler: ScriptedScheduler) -> None:
    worker = start()
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, PROMPT), New(1, PROMPT)], {0: 6, 1: 6}))
    await session.result()
    address, page_address = await worker.addresses()
    async with (
        grpc.aio.insecure_channel(address) as channel,
        calling(admin_of("worker", address)) as admin,
    ):
        reply = await eventually(
            lambda: admin.GetStatus(admin_pb2.GetStatusRequest()), lambda reply: reply.services[0].running == 2
        )
        status = reply.services[0]
        assert (status.id, status.role, status.state) == ("w", admin_pb2.ROLE_WORKER, admin_pb2.STATE_READY)
        assert (status.epoch, status.blocks.total, status.blocks.used) == (5, 127, 4)
        assert status.blocks.free + status.blocks.cached == 123
        assert 0 <= status.last_step_age_s < PATIENCE_S
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError, match="ask the scheduler") as refusal:
            await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="its scheduler"):
            await admin.PauseGeneration(admin_pb2.PauseGenerationRequest())
        with pytest.raises(grpc.aio.AioRpcError, match="its scheduler"):
            await admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest())
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        page = await asyncio.to_thread(_read, f"http://{page_address}/metrics")
        assert "quire_worker_slots_live 2.0" in page
        assert "quire_worker_blocks_used 4.0" in page
        assert "quire_worker_tokens_computed_total 12.0" in page
        assert "quire_worker_tokens_sampled_total 2.0" in page
        assert "quire_worker_epoch 5.0" in page
        assert 'quire_worker_step_phase_seconds_count{phase="forward"} 1.0' in page
        await admin.Drain(admin_pb2.DrainRequest())
    await session.leaving()
    session.close()
    await worker.ends()


def _read(url: str) -> str:
    with urllib.request.urlopen(url) as response:
        return str(response.read().decode())


@pytest.mark.parametrize("error", [asyncio.CancelledError, ValueError])
async def test_an_attachment_that_ends_unasked_is_followed_by_another_and_keeps_the_cache(
    start: Start, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]
) -> None:
    """grpc.aio raises CancelledError from a write after the call was cancelled on this side."""
    worker, take = start(), Attachment.submit_plan

    def fails(attachment: Attachment, plan: pb.StepPlan) -> None:
        take(attachment, plan)
        if attachment.epoch == 5 and plan.step_id == 2:
            raise error

    monkeypatch.setattr(Attachment, "submit_plan", fails)
    session, _ = await scheduler.attached(epoch=5)
    paper = PaperScheduler(4, 128, epoch=5)
    await session.plan(paper.plan([New(0, PROMPT)], {0: 6}))
    paper.take(await session.result())
    await session.plan(paper.plan())
    session, hello = await scheduler.attached(epoch=9)
    assert hello.last_epoch == 5
    assert len(hello.held.block_ids) > 0
    await finish(worker, session)


async def test_hanging_step_makes_the_worker_not_alive(
    start: Start, scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch, comes_back = Replica.launch, threading.Event()

    def hangs(*arguments: Any) -> Any:
        assert comes_back.wait(PATIENCE_S)
        return launch(*arguments)

    monkeypatch.setattr(Replica, "launch", hangs)
    worker = start(WorkerTiming(liveness_check_s=0.02, command_s=0.4))
    session, _ = await scheduler.attached(epoch=5)
    address, _ = await worker.addresses()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)

        async def until(status: object) -> None:
            await eventually(
                lambda: stub.Check(health_pb2.HealthCheckRequest(service=LIVENESS)),
                lambda found: found.status == status,
            )

        await until(SERVING)
        await session.plan(PaperScheduler(4, 128, epoch=5).plan([New(0, PROMPT)], {0: 6}))
        await until(NOT_SERVING)
        comes_back.set()
        await session.result()
        await until(SERVING)
    await finish(worker, session)
