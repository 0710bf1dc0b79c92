"""Messages larger than gRPC's limit pass a session, in order with small ones."""

from __future__ import annotations

import asyncio
import os
from collections import deque
from typing import Any

import grpc.aio
import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1.part_pb2 import Part
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.rpc import parts
from quire.shared.rpc.channel import SERVICE_MESSAGE_BYTES
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.silence import SILENCE_FACTOR, TURNS_PER_INTERVAL, Silence

TURNS = SILENCE_FACTOR * TURNS_PER_INTERVAL - 4  # that are made while one part is on its way


class Pipe:
    """Stream whose written messages can be read back."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    async def write(self, message: Any) -> None:
        assert message.ByteSize() <= SERVICE_MESSAGE_BYTES
        self.messages.append(type(message).FromString(message.SerializeToString()))

    async def read(self) -> Any:
        return self.messages.popleft() if self.messages else grpc.aio.EOF


def prompt(size: int) -> pb.SessionRequest:
    return pb.SessionRequest(submission=pb.Submission(token_ids=os.urandom(size)))


@pytest.mark.parametrize("size", [0, parts.PART_BYTES - 20, parts.PART_BYTES, 3 * parts.PART_BYTES + 7])
async def test_a_message_of_any_size_arrives_as_it_was(size: int) -> None:
    pipe, message, later = Pipe(), prompt(size), pb.SessionRequest(heartbeat=pb.Heartbeat())
    await PartStream(pipe).write(message)
    await PartStream(pipe).write(later)
    reader = PartStream(pipe)
    assert [await reader.read(), await reader.read(), await reader.read()] == [message, later, grpc.aio.EOF]


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        ([Part(data=b"\x00"), None], "another message before the last part"),
        ([Part(data=b"\x00")], "another message before the last part"),
        ([Part(data=b"\xff" * 30, last=True)], "not a quire.scheduler.v1.SessionRequest"),
        ([Part(data=bytes(1000))] * 5, "exceeds the limit of 4096 bytes"),
    ],
)
async def test_parts_that_are_no_message_are_refused(sent: list[Part | None], text: str) -> None:
    pipe = Pipe()
    for part in sent:
        await pipe.write(pb.SessionRequest(part=part) if part else pb.SessionRequest(heartbeat=pb.Heartbeat()))
    with pytest.raises(InvalidArgument, match=text):
        await PartStream(pipe, max_bytes=4096).read()


async def test_who_sends_a_message_over_a_slow_link_is_not_silent_and_hears_that_its_peer_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every part takes most of the allowed silence, and the whole message several times as long."""
    turn, made = Silence._turn, asyncio.Semaphore(0)
    sent, told = Pipe(), Pipe()

    def make(silence: Silence) -> None:
        turn(silence)
        made.release()

    class Slow:
        write = told.write

        async def read(self) -> Any:
            for _ in range(TURNS):
                await made.acquire()
            return await sent.read()

    monkeypatch.setattr(Silence, "_turn", make)
    message, heartbeat = prompt(4 * parts.PART_BYTES), pb.SessionRequest(heartbeat=pb.Heartbeat())
    await PartStream(sent).write(message)
    num_parts = len(sent.messages)
    duplex: Duplex[Any, Any] = Duplex(PartStream(Slow()), heartbeat, interval_s=0.04)
    assert await duplex.receive() == message
    assert [*told.messages] == (num_parts - 1) * [heartbeat]
    assert num_parts == 5
