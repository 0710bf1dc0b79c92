"""Accepting side of the handshake."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.shared.errors import Unauthenticated
from quire.shared.pb.common.v1 import handshake_pb2
from quire.shared.pb.worker.v1.worker_pb2 import AttachRequest, AttachResponse
from quire.shared.rpc.trust import HandshakeAcceptor
from quire.shared.security.secret_file import SecretFile
from tests.waiting import loop_turns

PATIENCE_S = 60.0
METHOD = "/peer/Talk"


@asynccontextmanager
async def serving(handler: grpc.RpcMethodHandler[Any, Any]) -> AsyncIterator[grpc.aio.Channel]:
    """Yields a channel to a server with one method."""
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("peer", {"Talk": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


async def test_a_caller_hears_why_its_session_ends_also_if_the_first_message_to_it_was_being_written() -> None:
    async def talk(_messages: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await HandshakeAcceptor(None, "scheduler s0").authenticate(context, AttachResponse, "Talk")
        first = asyncio.ensure_future(context.write(b"welcome"))
        await loop_turns()
        first.cancel()
        await asyncio.wait([first])
        assert first.cancelled()
        await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "no such step")

    async with serving(grpc.stream_stream_rpc_method_handler(talk)) as channel:
        call = channel.stream_stream(METHOD)()
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(grpc.aio.AioRpcError, match="no such step"):
                _ = [message async for message in call]


async def test_silent_unauthenticated_callers_time_out(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("s" * 40)
    path.chmod(0o600)
    acceptor = HandshakeAcceptor(SecretFile(str(path), "cluster_secret_file"), "scheduler s0", timeout_s=0.2)

    async def talk(_messages: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        try:
            await acceptor.authenticate(context, AttachResponse, "Talk")
        except Unauthenticated as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, error.message)

    decode, encode = AttachRequest.FromString, AttachResponse.SerializeToString
    async with serving(grpc.stream_stream_rpc_method_handler(talk, decode, encode)) as channel:
        call = channel.stream_stream(METHOD, AttachRequest.SerializeToString, AttachResponse.FromString)()
        introduction = handshake_pb2.Introduction(name="worker w0", nonce=bytes(32))
        await call.write(AttachRequest(handshake=handshake_pb2.Handshake(introduction=introduction)))
        assert (await call.read()).HasField("handshake")
        with pytest.raises(grpc.aio.AioRpcError, match=r"no proof of the cluster secret within 0\.2 s"):
            await call.read()
