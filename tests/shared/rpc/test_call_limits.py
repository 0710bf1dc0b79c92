"""Call limits of every gRPC port, tested with misbehaving clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb

from quire.shared.errors import Unauthenticated
from quire.shared.rpc.guard import CallGuard
from quire.shared.rpc.server import MAX_STREAMS, Server
from tests.attacks import floods, frames
from tests.attacks.calls import Target

CHECK, WATCH = (f"/grpc.health.v1.Health/{name}" for name in ("Check", "Watch"))
ANY = pb.HealthCheckRequest(service="").SerializeToString()
PATIENT_S = 600.0


@asynccontextmanager
async def serving(**arguments: Any) -> AsyncIterator[tuple[str, grpc.aio.Channel]]:
    server = Server("127.0.0.1", 0, ("a.Service",), **arguments)
    await server.start()
    address = f"127.0.0.1:{server.port}"
    try:
        async with asyncio.timeout(60), grpc.aio.insecure_channel(address) as channel:
            yield address, channel
    finally:
        await server.stop(grace_s=0)


async def nothing(never: asyncio.Event | None = None) -> AsyncIterator[bytes]:
    """Yields no request, and ends at once or when allowed to."""
    if never is not None:
        await never.wait()
    for request in ():
        yield request


async def code_of(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        await call.read() if hasattr(call, "read") else await call
    return ended.value.code()


async def test_calls_that_close_their_side_without_a_request_are_ended() -> None:
    async with serving(first_message_s=PATIENT_S) as (_, channel):
        assert await code_of(channel.stream_unary(CHECK)(nothing())) is grpc.StatusCode.INVALID_ARGUMENT
        assert await code_of(channel.stream_stream(WATCH)(nothing())) is grpc.StatusCode.INVALID_ARGUMENT


async def test_calls_that_bring_no_request_in_time_are_ended() -> None:
    async with serving(first_message_s=0.05) as (_, channel):
        never = asyncio.Event()
        assert await code_of(channel.stream_unary(CHECK)(nothing(never))) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await code_of(channel.stream_stream(WATCH)(nothing(never))) is grpc.StatusCode.DEADLINE_EXCEEDED
        never.set()


async def test_a_call_with_its_request_may_last_longer_than_it_may_wait_for_one() -> None:
    async with serving(first_message_s=0.05) as (_, channel):
        watch = channel.unary_stream(WATCH)(ANY)
        assert await watch.read()
        never = asyncio.Event()  # another call's time passes meanwhile
        assert await code_of(channel.stream_unary(CHECK)(nothing(never))) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not watch.done()
        watch.cancel()
        never.set()


async def test_calls_without_a_right_key_are_refused_before_their_request_is_there() -> None:
    guard = CallGuard(lambda _: Unauthenticated("no key"))
    async with serving(first_message_s=PATIENT_S, interceptors=[guard]) as (_, channel):
        never = asyncio.Event()
        for path in ("/a.Service/One", "/a.Service/Other"):
            assert await code_of(channel.stream_unary(path)(nothing(never))) is grpc.StatusCode.UNAUTHENTICATED
        never.set()


@pytest.mark.parametrize("count", [1, 1_500])
async def test_headers_that_take_too_much_are_refused(count: int) -> None:
    async with serving() as (_, channel):
        metadata = tuple((f"x-{number}", "a" * (40_000 // count)) for number in range(count))
        call = channel.unary_unary(CHECK)(ANY, metadata=metadata)
        assert await code_of(call) is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_headers_of_usual_clients_pass() -> None:
    async with serving() as (_, channel):
        token = (("authorization", "Bearer " + "a" * 8_000), *((f"x-{number}", "b" * 50) for number in range(50)))
        assert await channel.unary_unary(CHECK)(ANY, metadata=token)


async def test_calls_beyond_the_bound_of_a_connection_wait_for_a_place() -> None:
    async with serving(max_streams=2) as (_, channel):
        first = channel.unary_stream(WATCH)(ANY)
        assert await first.read()
        second = channel.unary_stream(WATCH)(ANY)
        assert await second.read()
        third = channel.unary_stream(WATCH)(ANY)
        waiting = asyncio.ensure_future(third.read())
        first.cancel()
        assert await waiting
        second.cancel()
        third.cancel()


@pytest.mark.parametrize("max_streams", [2, MAX_STREAMS])
async def test_no_call_of_many_at_once_is_refused(max_streams: int) -> None:
    async with serving(max_streams=max_streams) as (_, channel):

        async def watch() -> None:
            call = channel.unary_stream(WATCH)(ANY)
            assert await call.read()
            call.cancel()

        check = channel.unary_unary(CHECK)
        await asyncio.gather(*(check(ANY) if number % 2 else watch() for number in range(400)))


async def test_every_port_tells_its_bounds_in_its_settings() -> None:
    async with serving() as (address, _):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
        head = await reader.readexactly(frames.FRAME_HEAD_BYTES)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        writer.close()
    pairs = [payload[start : start + 6] for start in range(0, len(payload), 6)]
    told = {int.from_bytes(pair[:2], "big"): int.from_bytes(pair[2:], "big") for pair in pairs}
    assert told[frames.MAX_CONCURRENT_STREAMS] == MAX_STREAMS
    assert told[frames.MAX_HEADER_LIST_SIZE] == 32 * 1024


async def test_a_client_that_never_acknowledges_these_bounds_is_cut_off() -> None:
    async with serving() as (address, _):
        flood = floods.Flood(b"", 1, acknowledges=False, quiet_s=50.0)
        assert await flood.send(Target("", address)) == "closed"


@pytest.mark.parametrize("path", [CHECK, "/a.Service/Method"])
async def test_thousands_of_calls_without_a_request_all_end(path: str) -> None:
    async with serving(first_message_s=PATIENT_S) as (address, _):
        (flood,) = floods.without_messages(path, calls=2_000)
        assert await flood.send(Target("", address)) == "2000 of 2000 ended"


async def test_headers_that_go_on_without_end_are_cut_off() -> None:
    async with serving() as (address, channel):
        (flood,) = floods.without_end(4_000_000, CHECK)
        assert await flood.send(Target("", address)) in ("closed", "1 of 1 ended")
        assert await channel.unary_unary(CHECK)(ANY)
