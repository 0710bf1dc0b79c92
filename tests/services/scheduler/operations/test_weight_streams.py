"""Streams of weights are relayed to all workers of a scheduler, and nothing of a broken one stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import grpc.aio
import pytest

from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1.weights_stream_pb2 import TensorHead, TensorHeads, WeightsPiece
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2_grpc
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.rpc.channel import connect
from tests.services.scheduler.operations.test_weights import (
    DROP,
    PATIENCE_S,
    STAGE,
    SWAP,
    begin,
    until,
    until_state,
    worker,
)
from tests.services.scheduler.test_service import SchedulerHarness, Start, start

__all__ = ["start"]

PIECES = [
    WeightsPiece(heads=TensorHeads(tensors=[TensorHead(name="a", dtype="F32", shape=[1000])])),
    *(WeightsPiece(content=bytes([number]) * 400) for number in range(10)),
    WeightsPiece(end=b"digest"),
]


@asynccontextmanager
async def administering(bench: SchedulerHarness, update: int) -> AsyncIterator[Any]:
    """Opens a call that asks for an update by a stream."""
    async with connect(bench.address) as channel:
        call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Administer()
        request = admin_pb2.UpdateWeightsRequest(weight_version="streamed")
        await call.write(pb.AdministerRequest(update_weights=pb.UpdateWeights(update=update, request=request)))
        yield call
        call.cancel()


async def send(call: Any, pieces: list[WeightsPiece]) -> None:
    for piece in pieces:
        await call.write(pb.AdministerRequest(weights_piece=piece))


async def test_a_stream_reaches_exactly_its_workers(start: Start) -> None:
    bench = await start()
    first, second = await worker(bench, 0), await worker(bench, 1)
    frontend = await bench.frontend()
    async with administering(bench, 5) as call:
        await send(call, PIECES)
        assert (await call.read()).weights_staged.num_workers == 2
        assert first.fetched == second.fetched == PIECES
        await call.write(pb.AdministerRequest(swap_weights=pb.SwapStagedWeights()))
        assert (await call.read()).weights_updated.num_workers == 2
    assert first.operated == second.operated == [STAGE, SWAP]
    await begin(frontend, 0)
    await frontend.ended(0)
    assert frontend.weight_versions[0] == {"streamed"}
    with pytest.raises(grpc.aio.AioRpcError, match="no open stream of weights") as refused:
        await first.fetch(worker_pb2.StageWeights(stream_id=b"x" * 16))
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("half", [1, 5, len(PIECES)])
async def test_a_cancelled_call_leaves_no_state(start: Start, half: int) -> None:
    bench = await start()
    peer = await worker(bench)
    async with administering(bench, 5) as call:
        await send(call, PIECES[:half])
        await until(lambda: len(peer.fetched) == half)
    await until(lambda: peer.operated == [STAGE, DROP])
    assert peer.has_weights.version == "0"
    async with administering(bench, 6) as call:
        peer.fetched.clear()
        await send(call, PIECES)
        assert (await call.read()).HasField("weights_staged")


async def test_a_truncated_stream_is_refused(start: Start) -> None:
    bench = await start()
    peer = await worker(bench)
    async with administering(bench, 5) as call:
        await send(call, PIECES[:-1])
        await call.write(pb.AdministerRequest(swap_weights=pb.SwapStagedWeights()))
        assert "ended without its last message" in (await call.read()).weights_refused.message
    await until(lambda: peer.operated == [STAGE, DROP])


@pytest.mark.parametrize("how", ["refuses", "is lost"])
async def test_a_worker_that_stops_reading_ends_the_stream(start: Start, how: str) -> None:
    """The stream is longer than one worker's queue, which that worker does not read. The error is read while the stream
    is sent, as frontends do: a write at the end of a call does not return the reason."""
    bench = await start()
    stuck = {STAGE: asyncio.Event()} if how == "is lost" else {}
    first = await worker(bench, 0)
    second = await worker(bench, 1, refuses={STAGE}, hold_orders=stuck)
    async with administering(bench, 5) as call, asyncio.timeout(PATIENCE_S):
        reading = asyncio.ensure_future(call.read())
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await send(call, PIECES)
        await until(lambda: STAGE in second.operated)  # it may have the order to drop them already
        if how == "is lost":
            second.task.cancel()
        assert "w1: " in (await reading).weights_refused.message
        await until(lambda: first.operated == [STAGE, DROP])
    assert PIECES[-1] not in first.fetched


async def test_a_late_worker_waits_for_the_next_update(start: Start) -> None:
    bench = await start()
    peer = await worker(bench, 0)
    async with administering(bench, 5) as call:
        await send(call, PIECES)
        await call.read()
        await call.write(pb.AdministerRequest(swap_weights=pb.SwapStagedWeights()))
        await call.read()
    late = await worker(bench, 1)
    assert (await until_state(bench, "w1", admin_pb2.STATE_OUTDATED)).weight_version == "0"
    assert late.operated == []
    async with administering(bench, 6) as call:
        peer.fetched.clear()
        await send(call, PIECES)
        assert (await call.read()).weights_staged.num_workers == 2
        await call.write(pb.AdministerRequest(swap_weights=pb.SwapStagedWeights()))
        assert (await call.read()).weights_updated.num_workers == 2
    await until_state(bench, "w1", admin_pb2.STATE_READY)
