"""Weight updates: all workers swap or none, no answer mixes two versions unless that is requested, and workers that
were away are updated later."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from tests.admin import admin_of, calling
from tests.services.scheduler.operations.conftest import PauseRecorder
from tests.services.scheduler.scripted_peers import FrontendPeer, WorkerPeer
from tests.services.scheduler.test_service import PROMPTS, SchedulerHarness, Start, start
from tests.waiting import eventually

__all__ = ["start"]

PATIENCE_S = 60.0
NUM_TOKENS = 40
KEEP, ABORT, WAIT = pb.PAUSE_MODE_KEEP, pb.PAUSE_MODE_ABORT, pb.PAUSE_MODE_WAIT
STAGE, SWAP, DROP = "stage_weights", "swap_weights", "drop_weights"


async def update(bench: SchedulerHarness, version: str = "one", mode: pb.PauseMode = WAIT) -> pb.UpdateWeightsResponse:
    request = pb.UpdateWeightsRequest(path=f"folder-{version}", weight_version=version, mode=mode)
    async with calling(admin_of("scheduler", bench.address)) as admin:
        return await admin.UpdateWeights(request)


async def worker(bench: SchedulerHarness, number: int = 0, **fields: Any) -> WorkerPeer:
    return await bench.worker(id=f"w{number}", **fields)


async def counted(bench: SchedulerHarness) -> dict[str, float]:
    """Returns the number of updates by outcome."""
    return await bench.counted("quire_scheduler_weight_updates", "outcome")


async def until(condition: Callable[[], object]) -> None:
    await eventually(condition)


async def until_state(bench: SchedulerHarness, name: str, state: pb.State) -> pb.ServiceStatus:
    found = await eventually(bench.status, lambda found: name in found and found[name].state == state)
    return found[name]


async def begin(frontend: FrontendPeer, stream: int) -> None:
    await frontend.submit(stream, PROMPTS[stream], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    await frontend.until(lambda: len(frontend.tokens[stream]) > 2)


async def test_all_workers_stage_before_one_swaps(start: Start) -> None:
    bench = await start()
    late = asyncio.Event()
    first, second = await worker(bench, 0), await worker(bench, 1, hold_orders={STAGE: late})
    updating = asyncio.ensure_future(update(bench))
    await until(lambda: first.staged is not None and second.operated)
    assert first.operated == second.operated == [STAGE]
    late.set()
    answer = await updating
    assert (answer.weight_version, answer.num_workers) == ("one", 2)
    assert first.operated == second.operated == [STAGE, SWAP]
    assert first.has_weights == second.has_weights
    assert (first.has_weights.version, first.has_weights.path) == ("one", "folder-one")
    status = await bench.status()
    assert {status[name].weight_version for name in ("s0", "w0", "w1")} == {"one"}
    assert await counted(bench) == {"updated": 1, "failed": 0, "dropped": 0}


async def test_an_update_that_one_worker_refuses_is_dropped(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, refuses={STAGE})
    frontend = await bench.frontend()
    with pytest.raises(grpc.aio.AioRpcError, match="w1: cannot stage_weights") as refused:
        await update(bench)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await until(lambda: first.operated == second.operated == [STAGE, DROP])
    assert first.has_weights.version == second.has_weights.version == "0"
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"0"}
    assert await counted(bench) == {"updated": 0, "failed": 1, "dropped": 0}


async def test_running_sequences_finish_with_their_weights(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, reads_on=True)
    frontend = await bench.frontend()
    peer.stand_still_after(5)
    await begin(frontend, 0)
    updating = asyncio.ensure_future(update(bench))
    await until(lambda: peer.staged is not None)
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    peer.go_on()
    assert (await updating).num_aborted == 0
    await begin(frontend, 2)
    await frontend.ended(0, 1, 2)
    assert (frontend.weight_versions[0], frontend.weight_versions[2]) == ({"0"}, {"one"})
    assert frontend.weight_versions[1] in ({"0"}, {"one"}), "whether it arrived before or after the pause"
    assert len(frontend.tokens[0]) == len(frontend.tokens[1]) == NUM_TOKENS


async def test_kept_sequences_continue_with_recomputed_kv(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    peer = await worker(bench, reads_on=True)
    frontend = await bench.frontend()
    peer.stand_still_after(5)
    await begin(frontend, 0)
    answer = await holding.meet(peer, update(bench, mode=KEEP))
    assert (answer.num_kept, answer.num_aborted) == (1, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"0", "one"}
    peer.stand_still_after(5)
    await begin(frontend, 1)
    assert (await holding.meet(peer, update(bench, "two", mode=ABORT))).num_aborted == 1
    await frontend.ended(1)
    assert frontend.weight_versions[1] == {"one"}


async def test_prefixes_of_old_weights_are_not_reused(start: Start) -> None:
    bench = await start()
    await worker(bench)
    frontend = await bench.frontend()
    prompt = list(range(3, 24))
    for stream in range(3):
        if stream == 2:
            await update(bench)
        await frontend.submit(stream, prompt, max_tokens=4, eos_token_ids=b"")
        await frontend.ended(stream)
    assert frontend.cached == {0: 0, 1: 20, 2: 0}


async def test_an_update_during_a_pause_needs_an_explicit_mode(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    peer = await worker(bench)
    frontend = await bench.frontend()
    peer.stand_still_after(5)
    await begin(frontend, 0)
    async with calling(admin_of("scheduler", bench.address)) as admin:
        await holding.meet(peer, admin.PauseGeneration(pb.PauseGenerationRequest()))
        with pytest.raises(grpc.aio.AioRpcError, match="started requests wait"):
            await update(bench)
        await until(lambda: peer.operated == [STAGE, DROP])
        assert (await update(bench, mode=KEEP)).num_kept == 1
        await asyncio.sleep(0.05)
        assert (await bench.status())["s0"].state == pb.STATE_PAUSED, "as it was before"
        await admin.ResumeGeneration(pb.ResumeGenerationRequest())
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"0", "one"}


async def test_a_cancelled_call_leaves_no_state(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, hold_orders={STAGE: asyncio.Event()})
    frontend = await bench.frontend()
    updating = asyncio.ensure_future(update(bench))
    await until(lambda: peer.operated)
    updating.cancel()
    await until(lambda: peer.operated == [STAGE, DROP])
    await begin(frontend, 0)
    await frontend.ended(0)
    peer.hold_orders.clear()
    await update(bench)
    assert peer.has_weights.version == "one"
    assert await counted(bench) == {"updated": 1, "failed": 0, "dropped": 1}


async def test_a_late_worker_is_updated_before_it_gets_sequences(start: Start) -> None:
    bench = await start()
    await worker(bench, 0)
    await update(bench)
    frontend = await bench.frontend()
    await frontend.until(lambda: frontend.view.num_workers == 1)
    late = asyncio.Event()
    second = await worker(bench, 1, hold_orders={STAGE: late})
    await until_state(bench, "w1", pb.STATE_OUTDATED)
    assert frontend.view.num_workers == 1
    late.set()
    await until_state(bench, "w1", pb.STATE_READY)
    assert second.operated == [STAGE, SWAP]
    assert (second.has_weights.version, second.has_weights.path) == ("one", "folder-one")


async def test_a_worker_lost_during_a_swap_is_updated_later(start: Start) -> None:
    bench = await start()
    swapped = asyncio.Event()
    first, second = await worker(bench, 0), await worker(bench, 1, hold_orders={SWAP: swapped})
    frontend = await bench.frontend()
    updating = asyncio.ensure_future(update(bench))
    await until(lambda: SWAP in second.operated)
    second.call.cancel()
    assert (await updating).num_workers == 1
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"one"}
    again = await worker(bench, 1)
    await until_state(bench, "w1", pb.STATE_READY)
    assert first.has_weights == again.has_weights


async def test_a_worker_that_fails_the_swap_gets_no_sequences(start: Start) -> None:
    bench = await start()
    await worker(bench, 0)
    await worker(bench, 1, refuses={SWAP})
    frontend = await bench.frontend()
    assert (await update(bench)).num_workers == 1
    assert (await until_state(bench, "w1", pb.STATE_OUTDATED)).weight_version == "0"
    await frontend.until(lambda: frontend.view.num_workers == 1)


async def test_a_restarted_scheduler_takes_the_target_from_its_workers(start: Start) -> None:
    bench = await start()
    old = model_pb2.WeightsIdentity(update=5, version="five", path="folder-five")
    new = model_pb2.WeightsIdentity(update=7, version="seven", path="folder-seven")
    first = await worker(bench, 0, has_weights=old)
    frontend = await bench.frontend()
    await until_state(bench, "w0", pb.STATE_READY)
    await worker(bench, 1, has_weights=new)
    await until(lambda: first.has_weights == new)
    await until_state(bench, "w0", pb.STATE_READY)
    assert (await bench.status())["s0"].weight_version == "seven"
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"seven"}


async def test_a_frontend_announces_a_missed_update(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, hold_orders={STAGE: (staged := asyncio.Event())})
    frontend = await bench.frontend()
    await frontend.until(lambda: frontend.view.num_workers == 1)
    now_ms = time.time_ns() // 1_000_000 + 10**9  # of a clock that is days ahead
    for number, name in ((now_ms, "newer"), (now_ms - 5, "older"), (2**63, "of no time")):
        told = model_pb2.WeightsIdentity(update=number, version=name, path=f"folder-{name}")
        frontend.link.send(scheduler_pb2.SessionRequest(weights=told))
    await until(lambda: peer.operated == [STAGE])
    await frontend.until(lambda: frontend.view.num_workers == 0)
    staged.set()
    await frontend.until(lambda: frontend.view.num_workers == 1)
    assert (peer.has_weights.version, frontend.view.weights.version) == ("newer", "newer")


async def test_an_outdated_update_is_refused(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, hold_orders={STAGE: (staged := asyncio.Event())})
    frontend = await bench.frontend()
    updating = asyncio.ensure_future(update(bench))
    await until(lambda: peer.operated == [STAGE])
    newer = model_pb2.WeightsIdentity(update=time.time_ns() // 1_000_000 + 10**9, version="newer", path="folder-newer")
    frontend.link.send(scheduler_pb2.SessionRequest(weights=newer))
    await frontend.until(lambda: frontend.view.weights == newer)
    staged.set()
    with pytest.raises(grpc.aio.AioRpcError, match="must not be less than the number of the current weights"):
        await updating
    await until(lambda: peer.has_weights == newer)
    await until_state(bench, "s0", pb.STATE_READY)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"path": ""}, "path: '' must be the path of a folder"),
        ({"path": "a\0b"}, "must be the path of a folder"),
        ({"path": "a", "weight_version": "x" * 129}, "weight_version: must have at most 128 printable characters"),
        ({"path": "a", "weight_version": "a\nb"}, "weight_version: must have at most 128 printable characters"),
    ],
)
async def test_invalid_requests_are_refused(start: Start, fields: dict[str, str], text: str) -> None:
    bench = await start()
    peer = await worker(bench)
    async with calling(admin_of("scheduler", bench.address)) as admin:
        with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
            await admin.UpdateWeights(pb.UpdateWeightsRequest(**fields))
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert peer.operated == []


async def test_an_update_without_workers_is_unavailable(start: Start) -> None:
    bench = await start()
    with pytest.raises(grpc.aio.AioRpcError, match="no worker is attached") as refused:
        await update(bench)
    assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
