"""Long-lived streams: order, heartbeats, silence."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from quire.shared.errors import Unavailable
from quire.shared.process.lifecycle import run_until_first
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.silence import SILENCE_FACTOR
from tests.waiting import eventually, forever, loop_turns


class Wire:
    """The remote end: written messages, and messages to read."""

    def __init__(self) -> None:
        self.written: list[object] = []
        self.incoming: asyncio.Queue[object] = asyncio.Queue()
        self.slow = asyncio.Event()
        self.slow.set()

    async def read(self) -> object:
        return await self.incoming.get()

    async def write(self, message: object) -> None:
        await self.slow.wait()
        self.written.append(message)


async def test_messages_go_out_in_order_and_close_waits_for_them() -> None:
    wire = Wire()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=10)
    for i in range(3):
        duplex.send(i)
    duplex.close()
    await duplex.pump()
    assert wire.written == [0, 1, 2]


async def test_sending_never_waits_for_a_slow_peer() -> None:
    wire = Wire()
    wire.slow.clear()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=10)
    pump = asyncio.ensure_future(duplex.pump())
    for i in range(100):
        duplex.send(i)
    await loop_turns()
    assert duplex.backlog >= 99
    wire.slow.set()
    duplex.close()
    await pump
    assert wire.written == list(range(100))


async def test_an_idle_session_says_that_it_is_alive() -> None:
    wire = Wire()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=0.01)
    pump = asyncio.ensure_future(duplex.pump())
    await eventually(lambda: len(wire.written) >= 3)
    pump.cancel()
    assert set(wire.written) == {"beat"}


async def test_a_shorter_interval_holds_at_once() -> None:
    wire = Wire()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=10)
    pump = asyncio.ensure_future(duplex.pump())
    await loop_turns(3)
    duplex.set_heartbeat_interval(0.01)
    await eventually(lambda: wire.written)
    pump.cancel()
    assert set(wire.written) == {"beat"}


async def test_a_silent_peer_is_given_up() -> None:
    interval_s = 0.01
    duplex: Duplex[object, object] = Duplex(Wire(), "beat", interval_s)
    begin = asyncio.get_running_loop().time()
    with pytest.raises(Unavailable, match=r"silent for 0.05 s"):
        await duplex.receive()
    assert asyncio.get_running_loop().time() - begin >= 0.9 * SILENCE_FACTOR * interval_s


async def test_the_end_of_the_stream_ends_the_messages() -> None:
    wire = Wire()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=10)
    for item in ("a", "b", grpc.aio.EOF, grpc.aio.EOF):
        wire.incoming.put_nowait(item)
    assert [message async for message in duplex.messages()] == ["a", "b"]
    with pytest.raises(Unavailable, match="closed"):
        await duplex.receive()


Call = grpc.aio.StreamStreamCall


METHOD = "/peer/Talk"


@asynccontextmanager
async def served(talk: Callable[..., Awaitable[None]]) -> AsyncIterator[grpc.aio.Channel]:
    """Serves a peer that handles every call with `talk`."""
    methods = {"Talk": grpc.stream_stream_rpc_method_handler(talk)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@pytest_asyncio.fixture
async def call() -> AsyncIterator[Call]:
    """Opens a call to a silent peer."""

    async def say_nothing(_messages: object, context: grpc.aio.ServicerContext) -> None:
        await context.send_initial_metadata(())
        await forever()

    async with served(say_nothing) as channel:
        call = channel.stream_stream(METHOD)()
        await call.wait_for_connection()
        yield call
        call.cancel()


class Cancelled(Wire):
    """A locally cancelled call, as grpc.aio reports it to a pending read or write."""

    async def read(self) -> object:
        raise asyncio.CancelledError

    async def write(self, message: object) -> None:
        raise asyncio.CancelledError


async def test_a_call_that_was_cancelled_here_fails_like_any_other() -> None:
    duplex: Duplex[object, object] = Duplex(Cancelled(), "beat", interval_s=10)
    duplex.send("late")
    with pytest.raises(Unavailable, match="cancelled locally"):
        await duplex.pump()
    with pytest.raises(Unavailable, match="cancelled locally"):
        await duplex.receive()


async def test_a_reader_hears_why_its_peer_has_ended_the_session_also_while_it_writes() -> None:
    """gRPC alone reports the reason of about ten of these sessions as an internal error."""

    async def refuse(messages: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        await anext(messages)
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such step")

    async with served(refuse) as channel:
        for _ in range(400):
            duplex: Duplex[bytes, bytes] = Duplex(channel.stream_stream(METHOD)(), b"beat", interval_s=10)

            async def write_on(duplex: Duplex[bytes, bytes] = duplex) -> None:
                while True:
                    duplex.send(bytes(48_000))
                    await asyncio.to_thread(int)

            with pytest.raises(grpc.aio.AioRpcError, match="no such step") as ended:
                await run_until_first(duplex.receive(), duplex.pump(), write_on())
            assert ended.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_a_real_call_that_is_cancelled_here_ends_its_tasks_with_errors(call: Call) -> None:
    """Which error each task gets depends on whether a write was in progress."""
    duplex: Duplex[bytes, bytes] = Duplex(call, b"beat", interval_s=10)
    for _ in range(8):  # more than the peer's window, which it does not open further
        duplex.send(bytes(1 << 20))
    pump = asyncio.ensure_future(duplex.pump())
    await eventually(lambda: duplex.backlog != 8)
    call.cancel()
    with pytest.raises((Unavailable, asyncio.InvalidStateError)):
        await pump
    with pytest.raises(Unavailable, match="cancelled locally"):
        await duplex.receive()


async def test_a_session_with_a_mute_peer_ends_with_a_reason_and_not_with_a_cancellation(call: Call) -> None:
    duplex: Duplex[bytes, bytes] = Duplex(call, b"beat", interval_s=0.01)

    async def chatter() -> None:
        while True:
            duplex.send(b"more")
            await loop_turns()

    with pytest.raises(Unavailable, match="silent"):
        await run_until_first(duplex.receive(), duplex.pump(), chatter())


async def test_a_task_that_is_told_to_end_ends_as_told(call: Call) -> None:
    duplex: Duplex[bytes, bytes] = Duplex(call, b"beat", interval_s=10)
    reading = asyncio.ensure_future(duplex.receive())
    await loop_turns(3)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_a_process_that_stood_still_hears_its_peer_before_it_gives_it_up() -> None:
    """What the peer sent meanwhile is in the socket: the loop comes to it a few turns later."""
    wire = Wire()
    interval_s = 0.02
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s)
    reading = asyncio.ensure_future(duplex.receive())
    await asyncio.sleep(interval_s)
    time.sleep(20 * interval_s)  # noqa: ASYNC251 - the standstill
    asyncio.get_running_loop().call_later(interval_s, wire.incoming.put_nowait, "heard")
    assert await reading == "heard"
