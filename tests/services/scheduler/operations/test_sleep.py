"""All workers of a cluster sleep or none; existing and new sequences wait, and no step is planned meanwhile."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from quire.services.scheduler.replicas.orders import DeviceOrders
from quire.shared.errors import Unavailable
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2
from tests.admin import admin_of, calling
from tests.services.scheduler.operations.conftest import PauseRecorder
from tests.services.scheduler.operations.test_weights import NUM_TOKENS, begin, until, until_state, update, worker
from tests.services.scheduler.reference_worker import oracle
from tests.services.scheduler.scripted_peers import FrontendPeer
from tests.services.scheduler.test_service import PROMPTS, SchedulerHarness, Start, start
from tests.waiting import stays

__all__ = ["start"]

BOTH = ["kv_cache", "weights"]


async def ask(bench: SchedulerHarness, method: str, request: Any) -> Any:
    async with calling(admin_of("scheduler", bench.address)) as admin:
        return await getattr(admin, method)(request)


async def sleep(bench: SchedulerHarness, level: int = 0, mode: pb.PauseMode = pb.PAUSE_MODE_KEEP) -> pb.SleepResponse:
    return await ask(bench, "Sleep", pb.SleepRequest(level=level, mode=mode))


async def wake(bench: SchedulerHarness, *tags: str) -> list[str]:
    return list((await ask(bench, "WakeUp", pb.WakeUpRequest(tags=tags))).asleep)


def says_what_the_oracle_says(frontend: FrontendPeer, *streams: int) -> bool:
    return all(
        frontend.tokens[stream] == oracle(PROMPTS[stream], len(PROMPTS[stream]) + NUM_TOKENS, eos=False)
        for stream in streams
    )


async def test_sequences_wait_during_sleep_and_are_recomputed(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    peer = await worker(bench)
    frontend = await bench.frontend()
    peer.stand_still_after(5)
    await begin(frontend, 0)
    assert (await holding.meet(peer, sleep(bench))).num_kept == 1
    assert (peer.asleep, peer.sleep_level) == (BOTH, 1)
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    status = await bench.status()
    assert [status[name].state for name in ("s0", "w0")] == [pb.STATE_ASLEEP] * 2
    assert (list(status["w0"].asleep), status["w0"].sleep_level) == (BOTH, 1)
    await sleep(bench)
    assert await wake(bench, "weights") == ["kv_cache"]
    await frontend.until(lambda: len(frontend.tokens[0]) == peer.num_results)
    await stays(lambda: len(frontend.tokens[0]) == peer.num_results < NUM_TOKENS, 0.05)
    assert await wake(bench, "kv_cache") == []
    await frontend.ended(0, 1)
    assert says_what_the_oracle_says(frontend, 0, 1)
    assert (await bench.status())["s0"].state == pb.STATE_READY
    assert await wake(bench) == []


async def test_a_sleep_that_one_worker_refuses_is_undone(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, refuses={"sleep"})
    frontend = await bench.frontend()
    with pytest.raises(grpc.aio.AioRpcError, match="w1: cannot sleep"):
        await sleep(bench, 2)
    await until(lambda: first.operated == ["sleep", "wake_up"])
    assert (first.asleep, second.asleep) == ([], [])
    await begin(frontend, 0)
    await frontend.ended(0)


async def test_a_worker_of_unknown_state_has_to_reattach(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    give = DeviceOrders.execute

    async def gives_up(orders: DeviceOrders, order: worker_pb2.DeviceOrder, *timeout_s: float) -> None:
        if order.HasField("sleep"):
            orders.send_order(order)
            raise Unavailable("the worker did not answer")
        await give(orders, order, *timeout_s)

    monkeypatch.setattr(DeviceOrders, "execute", gives_up)
    bench = await start()
    peer = await worker(bench)
    frontend = await bench.frontend()
    with pytest.raises(grpc.aio.AioRpcError, match="w0: the worker did not answer"):
        await sleep(bench)
    await until(peer.task.done)
    again = await worker(bench, asleep=BOTH, sleep_level=1)
    await until(lambda: again.asleep == [])
    await begin(frontend, 0)
    await frontend.ended(0)


async def test_a_failed_wake_up_can_be_repeated(start: Start) -> None:
    bench = await start()
    await worker(bench, 0)
    second = await worker(bench, 1, refuses={"wake_up"})
    frontend = await bench.frontend()
    await sleep(bench)
    with pytest.raises(grpc.aio.AioRpcError, match="w1: cannot wake_up"):
        await wake(bench)
    assert (await bench.status())["s0"].state == pb.STATE_ASLEEP
    second.refuses.clear()
    assert await wake(bench) == []
    await begin(frontend, 0)
    await frontend.ended(0)


async def test_deadlines_expire_and_requests_can_be_aborted_before_sleep(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    peer = await worker(bench)
    frontend = await bench.frontend()
    peer.stand_still_after(5)
    await begin(frontend, 0)
    assert (await holding.meet(peer, sleep(bench, 1, pb.PAUSE_MODE_ABORT))).num_aborted == 1
    await frontend.submit(1, PROMPTS[1], max_tokens=NUM_TOKENS, timeout_ms=50)
    await frontend.ended(0, 1)
    reasons = [frontend.finished[stream].reason for stream in (0, 1)]
    assert reasons == [finish_pb2.FINISH_REASON_CANCELLED, finish_pb2.FINISH_REASON_DEADLINE]


async def test_a_worker_attaching_during_sleep_does_not_prevent_it(start: Start, holding: PauseRecorder) -> None:
    bench = await start()
    first = await worker(bench, 0)
    frontend = await bench.frontend()
    first.stand_still_after(5)
    await begin(frontend, 0)
    asked = asyncio.ensure_future(sleep(bench))
    await holding.begun.wait()
    second = await worker(bench, 1)
    first.go_on()
    assert (await asked).num_kept == 1
    assert first.asleep == second.asleep == BOTH
    await wake(bench)
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)


async def test_a_worker_attached_during_sleep_sleeps_and_wakes_with_the_others(start: Start) -> None:
    bench = await start()
    first = await worker(bench, 0)
    frontend = await bench.frontend()
    await sleep(bench, 2)
    first.call.cancel()
    again = await worker(bench, 0)
    await until(lambda: again.asleep == BOTH)
    await until_state(bench, "w0", pb.STATE_ASLEEP)
    assert await wake(bench, "weights") == ["kv_cache"]
    second = await worker(bench, 1)
    await until(lambda: second.asleep == ["kv_cache"])
    assert second.operated == ["sleep", "wake_up"]
    await until_state(bench, "w1", pb.STATE_ASLEEP)
    await wake(bench)
    await begin(frontend, 0)
    await frontend.ended(0)


async def test_a_restarted_scheduler_finds_its_workers_asleep(start: Start) -> None:
    bench = await start()
    await worker(bench, 0, asleep=BOTH, sleep_level=2)
    second = await worker(bench, 1, asleep=BOTH, sleep_level=2)
    frontend = await bench.frontend()
    await frontend.submit(0, PROMPTS[0], max_tokens=NUM_TOKENS, eos_token_ids=b"")
    assert (await bench.status())["s0"].sleep_level == 2
    assert await wake(bench) == []
    await frontend.ended(0)
    second.call.cancel()
    late = await worker(bench, 1, asleep=BOTH, sleep_level=2)
    await until(lambda: late.asleep == [])
    await until_state(bench, "w1", pb.STATE_READY)


async def test_a_wake_up_before_workers_attach_applies_to_them(start: Start) -> None:
    """An operator who repeats a call after a scheduler crash may be faster than the workers."""
    bench = await start()
    assert await wake(bench, "kv_cache") == []  # whose sleep state is unknown
    assert await wake(bench) == []
    first = await worker(bench, 0, asleep=BOTH, sleep_level=2)
    await until(lambda: first.asleep == [])
    frontend = await bench.frontend()
    await begin(frontend, 0)
    await frontend.ended(0)
    assert says_what_the_oracle_says(frontend, 0)
    assert not (await bench.status())["s0"].asleep


async def test_a_partial_wake_up_before_workers_attach_changes_nothing(start: Start) -> None:
    bench = await start()
    await wake(bench, "weights")
    first = await worker(bench, 0, asleep=BOTH, sleep_level=2)
    assert await wake(bench, "weights") == ["kv_cache"]
    assert first.asleep == ["kv_cache"]


async def test_weights_change_while_the_kv_sleeps(start: Start) -> None:
    bench = await start()
    peer = await worker(bench)
    frontend = await bench.frontend()
    await sleep(bench, 2)
    await wake(bench, "weights")
    assert (await update(bench)).num_workers == 1
    assert (await bench.status())["s0"].state == pb.STATE_ASLEEP
    await wake(bench)
    assert peer.has_weights.version == "one"
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"one"}


@pytest.mark.parametrize(
    ("method", "request_", "text"),
    [
        ("Sleep", pb.SleepRequest(level=3), "level: must be 1 or 2, got 3"),
        ("WakeUp", pb.WakeUpRequest(tags=["graphs"]), "tags: must be among kv_cache, weights, got 'graphs'"),
    ],
)
async def test_invalid_requests_are_refused(start: Start, method: str, request_: Any, text: str) -> None:
    bench = await start()
    with pytest.raises(grpc.aio.AioRpcError, match=text) as refused:
        await ask(bench, method, request_)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
