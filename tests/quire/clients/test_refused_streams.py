"""Errors seen by a client that is still sending when the server refuses the call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from quire.clients.refused_streams import await_answer
from quire.shared.errors import ResourceExhausted

NUM_CALLS = 400  # of which gRPC alone gets about ten wrong


async def refuse(messages: AsyncIterator[bytes], context: Any) -> bytes:
    await anext(messages)
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "no room")
    return b""


async def take(messages: AsyncIterator[bytes], _: Any) -> bytes:
    return b"".join([message async for message in messages])


async def pieces() -> AsyncIterator[bytes]:
    for _ in range(11):
        await asyncio.to_thread(int)  # as from a disk
        yield b"x" * 48_000


async def test_a_refusal_is_heard_by_whoever_is_still_sending() -> None:
    methods = {
        "Refuse": grpc.stream_unary_rpc_method_handler(refuse),
        "Take": grpc.stream_unary_rpc_method_handler(take),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test.Files", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert len(await await_answer(channel.stream_unary("/test.Files/Take")(pieces()))) == 11 * 48_000
            refused = channel.stream_unary("/test.Files/Refuse")
            for _ in range(NUM_CALLS):
                with pytest.raises(ResourceExhausted, match=r"^no room$"):
                    await await_answer(refused(pieces()))
    finally:
        await server.stop(None)
