"""Groups in which a trainer broadcasts weights: every rank of every worker is a member, or none."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1.weights_stream_pb2 import BroadcastContent, WeightsPiece
from quire.shared.pb.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.rpc.channel import connect
from tests.admin import admin_of, calling
from tests.services.scheduler.operations.test_weight_streams import PIECES, administering, send
from tests.services.scheduler.operations.test_weights import DROP, STAGE, SWAP, begin, until, worker
from tests.services.scheduler.test_service import SchedulerHarness, Start, start

__all__ = ["start"]

JOIN, LEAVE, RECEIVE = "join_weights_group", "leave_weights_group", "receive_weights"
NAME = "weight_update_group"
BROADCAST = [PIECES[0], WeightsPiece(broadcast=BroadcastContent(timeout_ms=5000)), WeightsPiece(end=b"")]


async def init(bench: SchedulerHarness, **fields: Any) -> pb.InitWeightsUpdateGroupResponse:
    place = {"master_address": "trainer", "master_port": 1234, "rank_offset": 1, "world_size": 8}
    async with calling(admin_of("scheduler", bench.address)) as admin:
        return await admin.InitWeightsUpdateGroup(pb.InitWeightsUpdateGroupRequest(**place | fields))


async def destroy(bench: SchedulerHarness, **fields: Any) -> None:
    async with calling(admin_of("scheduler", bench.address)) as admin:
        await admin.DestroyWeightsUpdateGroup(pb.DestroyWeightsUpdateGroupRequest(**fields))


async def test_ranks_are_ordered_by_worker_name(start: Start) -> None:
    bench = await start()
    peers = [
        await worker(bench, n, hello=worker_pb2.WorkerHello(parallelism=worker_pb2.Parallelism(num_ranks=ranks)))
        for n, ranks in ((2, 0), (0, 2), (1, 3))
    ]
    assert (await init(bench, rank_offset=2)).num_ranks == 6
    assert [peer.joins[0].first_rank for peer in peers] == [7, 2, 4]
    wanted = worker_pb2.JoinWeightsGroup(
        master_address="trainer", master_port=1234, first_rank=7, world_size=8, group_name=NAME, backend="nccl",
        timeout_ms=120_000,
    )  # fmt: skip
    assert peers[0].joins == [wanted]
    await destroy(bench)
    assert all(peer.operated == [JOIN, LEAVE] for peer in peers)
    await destroy(bench, group_name="another")


async def test_a_group_that_one_worker_refuses_is_left_by_all(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, refuses={JOIN})
    with pytest.raises(grpc.aio.AioRpcError, match="w1: cannot join_weights_group"):
        await init(bench)
    await until(lambda: first.operated == second.operated == [JOIN, LEAVE])
    assert first.groups == set()


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"world_size": 2}, "world_size: must be at least 3, for 2 ranks of workers from rank 1 on; got 2"),
        ({"rank_offset": 0}, "rank_offset: must be 1 to 65536, got 0"),
        ({"master_address": ""}, "master_address: '' is not a host"),
        ({"backend": "mpi"}, "backend: must be nccl or gloo, got 'mpi'"),
        ({"group_name": "x" * 65}, "group_name: must have 1 to 64 letters"),
        ({"timeout_ms": 540_001}, "timeout_ms: must be 0 to 540000, got 540001"),
    ],
)
async def test_invalid_groups_reach_no_worker(start: Start, fields: dict[str, Any], said: str) -> None:
    bench = await start()
    peers = [await worker(bench, 0), await worker(bench, 1)]
    with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
        await init(bench, **fields)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert not any(peer.operated for peer in peers)


async def test_a_wrong_number_of_ranks_is_refused(start: Start) -> None:
    """A worker has attached or detached meanwhile."""
    bench = await start()
    peer = await worker(bench)
    with pytest.raises(
        grpc.aio.AioRpcError, match="workers attached or detached during the call: they have 1 ranks, not 2"
    ):
        await administer(bench, num_ranks=2)
    assert peer.operated == []
    assert (await administer(bench, num_ranks=1)).weights_update_group.num_ranks == 1
    assert peer.joins[0].first_rank == 3


async def administer(bench: SchedulerHarness, num_ranks: int) -> scheduler_pb2.AdministerResponse:
    request = pb.InitWeightsUpdateGroupRequest(master_address="a", master_port=1, rank_offset=1, world_size=9)
    asked = scheduler_pb2.InitWeightsUpdateGroup(request=request, first_rank=3, num_ranks=num_ranks)
    async with connect(bench.address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Administer()
        await call.write(scheduler_pb2.AdministerRequest(init_weights_update_group=asked))
        return await call.read()  # type: ignore[no-any-return]


async def test_all_workers_check_the_description_before_receiving(start: Start) -> None:
    bench = await start()
    late = asyncio.Event()
    first, second = await worker(bench, 0), await worker(bench, 1, hold_orders={STAGE: late})
    frontend = await bench.frontend()
    async with administering(bench, 5) as call:
        await send(call, BROADCAST)
        await until(lambda: first.staged is not None and second.operated)
        assert first.operated == second.operated == [STAGE]
        late.set()
        assert (await call.read()).weights_staged.num_workers == 2
        assert first.operated == second.operated == [STAGE, RECEIVE]
        await call.write(scheduler_pb2.AdministerRequest(swap_weights=scheduler_pb2.SwapStagedWeights()))
        assert (await call.read()).weights_updated.num_workers == 2
    assert first.operated == second.operated == [STAGE, RECEIVE, SWAP]
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"streamed"}


async def test_a_failed_receive_ends_the_group_and_changes_nothing(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, refuses={RECEIVE})
    await init(bench)
    async with administering(bench, 5) as call:
        await send(call, BROADCAST)
        assert "w1: cannot receive_weights" in (await call.read()).weights_refused.message
    await until(lambda: first.operated == second.operated == [JOIN, STAGE, RECEIVE, LEAVE, DROP])
    assert first.groups == set()
    assert first.has_weights.version == "0"


async def test_a_refused_description_keeps_the_group(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1, refuses={STAGE})
    await init(bench)
    async with administering(bench, 5) as call:
        await send(call, BROADCAST)
        assert "w1: cannot stage_weights" in (await call.read()).weights_refused.message
    await until(lambda: first.operated[-1] == second.operated[-1] == DROP)
    assert first.groups == {NAME}
    assert RECEIVE not in (*first.operated, *second.operated)


async def test_a_worker_without_concurrent_staging_joins_between_steps(start: Start) -> None:
    """Its cached prefixes stay valid."""
    bench = await start()
    joining = asyncio.Event()
    peer = await worker(bench, hold_orders={JOIN: joining}, stages_beside_steps=False)
    frontend = await bench.frontend()
    await begin(frontend, 0)
    asked = asyncio.ensure_future(init(bench))
    await until(lambda: peer.operated == [JOIN])
    num_tokens = len(frontend.tokens[0])
    assert (await bench.status())["s0"].state == pb.STATE_PAUSED
    joining.set()
    await asked
    await frontend.ended(0)
    assert len(frontend.tokens[0]) >= num_tokens
    assert peer.num_resets == 0
