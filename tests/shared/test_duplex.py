"""Long-lived streams: order, heartbeats, silence."""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from shared.errors import Unavailable
from shared.rpc.duplex import SILENCE_FACTOR, Duplex


class Wire:
    """The far end: what was written, and what there is to read."""

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
    await asyncio.sleep(0)
    assert duplex.backlog >= 99
    wire.slow.set()
    duplex.close()
    await pump
    assert wire.written == list(range(100))


async def test_an_idle_session_says_that_it_is_alive() -> None:
    wire = Wire()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=0.01)
    pump = asyncio.ensure_future(duplex.pump())
    while len(wire.written) < 3:
        await asyncio.sleep(0.005)
    pump.cancel()
    assert set(wire.written) == {"beat"}


async def test_a_shorter_interval_holds_at_once() -> None:
    wire = Wire()
    duplex: Duplex[object, object] = Duplex(wire, "beat", interval_s=10)
    pump = asyncio.ensure_future(duplex.pump())
    await asyncio.sleep(0.01)
    duplex.beat_every(0.01)
    async with asyncio.timeout(2):
        while not wire.written:
            await asyncio.sleep(0.005)
    pump.cancel()


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
