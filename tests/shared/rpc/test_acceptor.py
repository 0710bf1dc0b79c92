"""Accepting side of the handshake."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.shared.pb.worker.v1.worker_pb2 import AttachResponse
from quire.shared.rpc.trust import HandshakeAcceptor
from tests.waiting import loop_turns

PATIENCE_S = 60.0
METHOD = "/peer/Talk"


async def test_a_caller_hears_why_its_session_ends_also_if_the_first_message_to_it_was_being_written() -> None:
    async def talk(_messages: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await HandshakeAcceptor(None, "scheduler s0").authenticate(context, AttachResponse, "Talk")
        first = asyncio.ensure_future(context.write(b"welcome"))
        await loop_turns()
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such step")

    server = grpc.aio.server()
    methods = {"Talk": grpc.stream_stream_rpc_method_handler(talk)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", methods),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream(METHOD)()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError, match="no such step"):
                _ = [message async for message in call]
    await server.stop(0)
