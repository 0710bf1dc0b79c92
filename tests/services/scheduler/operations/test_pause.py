"""Generation is paused and resumed: no step runs meanwhile, nothing is lost, and nothing stays stuck."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator

import grpc.aio
import pytest

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import finish_pb2
from tests.admin import admin_of, calling
from tests.observing import calls_of
from tests.services.scheduler.operations.conftest import PauseRecorder
from tests.services.scheduler.reference_worker import oracle
from tests.services.scheduler.scripted_peers import FrontendPeer, WorkerPeer
from tests.services.scheduler.test_service import PROMPTS, SchedulerHarness, Start, start
from tests.waiting import stays

__all__ = ["start"]

NUM_TOKENS = 60
SOME_STEPS_S = 0.1
KEEP, ABORT, WAIT = admin_pb2.PAUSE_MODE_KEEP, admin_pb2.PAUSE_MODE_ABORT, admin_pb2.PAUSE_MODE_WAIT


async def pause(bench: SchedulerHarness, mode: admin_pb2.PauseMode = KEEP) -> admin_pb2.PauseGenerationResponse:
    async with calling(admin_of("scheduler", bench.address)) as admin:
        return await admin.PauseGeneration(admin_pb2.PauseGenerationRequest(mode=mode))


async def resume(bench: SchedulerHarness) -> None:
    async with calling(admin_of("scheduler", bench.address)) as admin:
        await admin.ResumeGeneration(admin_pb2.ResumeGenerationRequest())


async def begin(frontend: FrontendPeer, worker: WorkerPeer) -> None:
    """Submits stream 0, in the middle of which the worker stands still."""
    worker.stand_still_after(5)
    await frontend.submit(0, PROMPTS[0], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[0]) > 2)


async def all_told(frontend: FrontendPeer, worker: WorkerPeer) -> int:
    """Returns the tokens of stream 0 once everything that the worker sent has arrived."""
    await frontend.until(lambda: len(frontend.tokens[0]) == worker.num_results)
    return worker.num_results


def says_what_the_oracle_says(frontend: FrontendPeer, *streams: int) -> bool:
    return all(
        frontend.tokens[stream] == oracle(PROMPTS[stream], len(PROMPTS[stream]) + NUM_TOKENS, eos=False)
        for stream in streams
    )


async def test_running_and_new_sequences_wait_and_resume(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    worker = await bench.worker()
    frontend = await bench.frontend()
    await begin(frontend, worker)
    assert (await holding.meet(worker, pause(bench))).num_kept == 1
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await frontend.until(lambda: (frontend.view.num_running, frontend.view.num_waiting) == (1, 1))
    before = await all_told(frontend, worker)
    await stays(lambda: (len(frontend.tokens[0]), len(frontend.tokens[1])) == (before, 0), SOME_STEPS_S)
    states = {name: service.state for name, service in (await bench.status()).items()}
    assert (len(frontend.tokens[0]), len(frontend.tokens[1])) == (before, 0)
    assert (states["s0"], states[worker.id]) == (admin_pb2.STATE_PAUSED, admin_pb2.STATE_PAUSED)
    assert (await pause(bench)).num_kept == 2
    await resume(bench)
    await frontend.ended(0, 1)
    assert says_what_the_oracle_says(frontend, 0, 1)
    assert (await bench.status())["s0"].state == admin_pb2.STATE_READY


async def test_the_call_returns_when_no_step_is_in_flight(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    hold = asyncio.Event()
    await bench.worker(hold=hold)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await frontend.until(lambda: frontend.view.num_running == 1)
    asked = asyncio.ensure_future(pause(bench))
    await holding.begun.wait()
    await stays(lambda: not asked.done(), SOME_STEPS_S)
    hold.set()
    assert (await asked).num_kept == 1
    assert not frontend.finished
    await resume(bench)
    await frontend.ended(0)


async def test_aborted_sequences_end_with_their_output(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    worker = await bench.worker()
    frontend = await bench.frontend()
    await begin(frontend, worker)
    answer = await holding.meet(worker, pause(bench, ABORT))
    await frontend.ended(0)
    assert (answer.num_kept, answer.num_aborted) == (0, 1)
    assert frontend.finished[0].reason == finish_pb2.FINISH_REASON_CANCELLED
    assert 2 < len(frontend.tokens[0]) < NUM_TOKENS
    assert (await bench.status())[worker.id].blocks.used == 0
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await resume(bench)
    await frontend.ended(1)
    assert says_what_the_oracle_says(frontend, 1)


async def test_cancellations_and_deadlines_work_during_a_pause(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    worker = await bench.worker()
    frontend = await bench.frontend()
    await begin(frontend, worker)
    await holding.meet(worker, pause(bench))
    await frontend.submit(1, PROMPTS[1], timeout_ms=100)
    await frontend.cancel(0)
    await frontend.ended(0, 1)
    assert frontend.finished[0].reason == finish_pb2.FINISH_REASON_CANCELLED
    assert frontend.finished[1].reason == finish_pb2.FINISH_REASON_DEADLINE
    assert (await bench.status())[worker.id].blocks.used == 0


@pytest.mark.parametrize("leaves", [True, False])
async def test_a_worker_attached_during_a_pause_works_after_it(
    start: Start, holding: PauseRecorder, leaves: bool
) -> None:
    bench = await start()
    worker = await bench.worker(id="w0")
    frontend = await bench.frontend()
    await begin(frontend, worker)
    await holding.meet(worker, pause(bench))
    if leaves:
        await worker.leave()
        await worker.task  # type: ignore[attr-defined]
    else:
        worker.call.cancel()
        await asyncio.wait([worker.task])  # type: ignore[attr-defined]
    await bench.worker(id="w1")
    before = await all_told(frontend, worker)
    await stays(lambda: len(frontend.tokens[0]) == before < NUM_TOKENS, SOME_STEPS_S)
    await resume(bench)
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)


async def test_a_reset_of_the_cache_does_not_resume(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    worker = await bench.worker()
    frontend = await bench.frontend()
    await begin(frontend, worker)
    await holding.meet(worker, pause(bench))
    async with calling(admin_of("scheduler", bench.address)) as admin:
        await admin.ResetPrefixCache(admin_pb2.ResetPrefixCacheRequest(preempt_running=True))
    before = await all_told(frontend, worker)
    await stays(lambda: len(frontend.tokens[0]) == before, SOME_STEPS_S)
    await resume(bench)
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)


class ParkingRecorder:
    """Records whether the scheduler keeps new sequences unassigned."""

    def __init__(self) -> None:
        self.begun, self.ended = asyncio.Event(), asyncio.Event()

    def record_paused(self, parking: bool) -> None:
        (self.begun if parking else self.ended).set()
        (self.ended if parking else self.begun).clear()


@pytest.fixture
def parking() -> Iterator[ParkingRecorder]:
    seen, names = ParkingRecorder(), [*inspect.signature(WorkerCluster.set_parking).parameters]
    with calls_of(
        WorkerCluster.set_parking, on_return=lambda call: seen.record_paused(bool(call.arguments[names[-1]]))
    ):
        yield seen


async def begin_to_wait(
    bench: SchedulerHarness, frontend: FrontendPeer, parking: ParkingRecorder
) -> asyncio.Task[admin_pb2.PauseGenerationResponse]:
    """Starts a wait for stream 0, whose first step its worker delays."""
    await frontend.submit(0, PROMPTS[0], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await frontend.until(lambda: frontend.view.num_running == 1)
    asked = asyncio.ensure_future(pause(bench, WAIT))
    await parking.begun.wait()
    return asked


async def test_running_sequences_finish_first_and_new_ones_wait(start: Start, parking: ParkingRecorder) -> None:
    bench = await start()
    hold = asyncio.Event()
    worker = await bench.worker(hold=hold)
    frontend = await bench.frontend()
    asked = await begin_to_wait(bench, frontend, parking)
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await frontend.submit(2, PROMPTS[2], timeout_ms=100)
    await frontend.ended(2)
    assert not asked.done()
    hold.set()
    answer = await asked
    await frontend.ended(0)
    assert (answer.num_kept, answer.num_aborted) == (1, 0)
    assert says_what_the_oracle_says(frontend, 0)
    assert (len(frontend.tokens[1]), frontend.finished[2].reason) == (0, finish_pb2.FINISH_REASON_DEADLINE)
    assert (await bench.status())[worker.id].state == admin_pb2.STATE_PAUSED
    await resume(bench)
    await frontend.ended(1)
    assert says_what_the_oracle_says(frontend, 1)


async def test_a_cancelled_call_pauses_nothing(start: Start, parking: ParkingRecorder) -> None:
    bench = await start()
    hold = asyncio.Event()
    worker = await bench.worker(hold=hold)
    frontend = await bench.frontend()
    asked = await begin_to_wait(bench, frontend, parking)
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    asked.cancel()
    await parking.ended.wait()
    hold.set()
    await frontend.ended(0, 1)
    assert says_what_the_oracle_says(frontend, 0, 1)
    assert (await bench.status())[worker.id].state == admin_pb2.STATE_READY


async def test_a_resumed_wait_fails(start: Start, parking: ParkingRecorder) -> None:
    bench = await start()
    hold = asyncio.Event()
    await bench.worker(hold=hold)
    frontend = await bench.frontend()
    asked = await begin_to_wait(bench, frontend, parking)
    await resume(bench)
    with pytest.raises(grpc.aio.AioRpcError, match="generation was resumed before the running sequences had ended"):
        await asked
    hold.set()
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)


async def test_a_wait_interrupted_by_a_pause_keeps_sequences(start: Start, parking: ParkingRecorder) -> None:
    bench = await start()
    hold = asyncio.Event()
    await bench.worker(hold=hold)
    frontend = await bench.frontend()
    asked = await begin_to_wait(bench, frontend, parking)
    kept = asyncio.ensure_future(pause(bench))
    await parking.ended.wait()
    hold.set()
    assert ((await asked).num_kept, (await kept).num_kept) == (1, 1)
    assert (await pause(bench, WAIT)).num_kept == 1, "what is paused does not end"
    await resume(bench)
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)


async def test_sequences_of_a_lost_worker_wait_during_a_pause(start: Start, parking: ParkingRecorder) -> None:
    bench = await start()
    worker = await bench.worker(id="w0", hold=asyncio.Event())
    frontend = await bench.frontend()
    asked = await begin_to_wait(bench, frontend, parking)
    worker.call.cancel()
    assert (await asked).num_kept == 1
    await bench.worker(id="w1")
    await resume(bench)
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)
