"""grpc.health.v1 with malformed requests, and with too many."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb
from grpc_health.v1.health_pb2_grpc import HealthStub

from quire.shared.rpc.health import Health
from quire.shared.rpc.server import LIVENESS, Server
from tests.waiting import loop_turns

SERVING, NOT_SERVING = pb.HealthCheckResponse.SERVING, pb.HealthCheckResponse.NOT_SERVING
CHECK, WATCH, LIST = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch", "List"))


@asynccontextmanager
async def serving() -> AsyncIterator[tuple[Server, grpc.aio.Channel]]:
    server = Server("127.0.0.1", 0, ("a.Service",), max_receive_bytes=1 << 24)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield server, channel
    finally:
        async with asyncio.timeout(20):
            await server.stop(grace_s=0)


async def test_who_asks_hears_what_was_set_last() -> None:
    async with serving() as (server, channel):
        stub = HealthStub(channel)  # type: ignore[no-untyped-call]
        assert (await stub.Check(pb.HealthCheckRequest())).status == NOT_SERVING
        assert (await stub.Check(pb.HealthCheckRequest(service=LIVENESS))).status == SERVING
        watches = [stub.Watch(pb.HealthCheckRequest(service=name)) for name in ("", "a.Service", "nobody")]
        heard = [(await watch.read()).status for watch in watches]
        assert heard == [NOT_SERVING, NOT_SERVING, pb.HealthCheckResponse.SERVICE_UNKNOWN]
        await server.set_serving(True)
        await server.set_serving(True)
        assert [(await watch.read()).status for watch in watches[:2]] == [SERVING, SERVING]
        await server.set_serving(False)
        assert [(await watch.read()).status for watch in watches[:2]] == [NOT_SERVING, NOT_SERVING]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Check(pb.HealthCheckRequest(service="nobody"))
        assert refused.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize(
    "question",
    [
        b"\xff\xff",
        b"\x0a\x02\xff\xfe",
        pb.HealthCheckRequest(service="a" * 1_000_000).SerializeToString(),
        b"\x12\xc0\x84\x3d" + b"a" * 1_000_000,  # an unknown field
    ],
)
async def test_what_is_no_question_is_refused_and_not_kept(question: bytes, caplog: pytest.LogCaptureFixture) -> None:
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as checked:
            await channel.unary_unary(CHECK)(question)
        with pytest.raises(grpc.aio.AioRpcError) as watched:
            await channel.unary_stream(WATCH)(question).read()
        with pytest.raises(grpc.aio.AioRpcError) as listed:
            await channel.unary_unary(LIST)(question)
    codes = [error.value.code() for error in (checked, watched, listed)]
    assert codes == [grpc.StatusCode.INVALID_ARGUMENT] * 2 + [grpc.StatusCode.UNIMPLEMENTED]
    assert not caplog.records, "a stranger writes pages of traces into the log"


@asynccontextmanager
async def allowing(max_watches: int) -> AsyncIterator[grpc.aio.Channel]:
    """Serves nothing but health, to a limited number of watches."""
    server, health = grpc.aio.server(), Health(max_watches)
    health.set("", NOT_SERVING)
    server.add_generic_rpc_handlers((health.handler(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_only_so_many_watch_at_once() -> None:
    async with allowing(3) as channel:
        stub = HealthStub(channel)  # type: ignore[no-untyped-call]
        watches = [stub.Watch(pb.HealthCheckRequest()) for _ in range(3)]
        assert [(await watch.read()).status for watch in watches] == [NOT_SERVING] * 3
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Watch(pb.HealthCheckRequest()).read()
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await stub.Check(pb.HealthCheckRequest())).status == NOT_SERVING
        watches[0].cancel()
        async with asyncio.timeout(20):
            while True:
                watch = stub.Watch(pb.HealthCheckRequest())
                try:
                    assert (await watch.read()).status == NOT_SERVING
                    break
                except grpc.aio.AioRpcError:
                    await loop_turns()
