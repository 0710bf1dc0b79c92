"""grpc.health.v1, which anybody may ask: what strangers send or leave unread costs little, and nobody waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2 as pb

SERVICE_NAME: str = pb.DESCRIPTOR.services_by_name["Health"].full_name
SERVING = pb.HealthCheckResponse.SERVING
NOT_SERVING = pb.HealthCheckResponse.NOT_SERVING
UNKNOWN = pb.HealthCheckResponse.SERVICE_UNKNOWN

MOST_BYTES = 1024  # of a question; gRPC holds it for as long as its call lasts
MOST_WATCHES = 1024  # at once; each has some 20 KB in gRPC

Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """Of one server. Watches follow what is set, and set() waits for none of them."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {}
        self._news = asyncio.Event()
        self._num_watches = 0

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._news.set()
        self._news = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, response_serializer=_answer),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=_answer),
            },
        )

    async def _check(self, question: bytes, context: Context) -> int:
        status = self._statuses.get(await _service(question, context))
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return status

    async def _watch(self, question: bytes, context: Context) -> AsyncIterator[int]:
        service = await _service(question, context)
        if self._num_watches >= MOST_WATCHES:
            text = f"{MOST_WATCHES} watch already: that is the most there may be; Check is answered"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._num_watches += 1
        try:
            told = None
            while True:
                news, status = self._news, self._statuses.get(service, UNKNOWN)
                if status != told:
                    yield status
                    told = status
                await news.wait()
        finally:
            self._num_watches -= 1


async def _service(question: bytes, context: Context) -> str:
    """Ends the call of who asks for none."""
    try:
        if len(question) <= MOST_BYTES:
            return str(pb.HealthCheckRequest.FromString(question).service)
    except DecodeError:
        pass
    text = f"a HealthCheckRequest of at most {MOST_BYTES} bytes is expected here"
    return str(await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text))


def _answer(status: int) -> bytes:
    return bytes(pb.HealthCheckResponse(status=status).SerializeToString())
