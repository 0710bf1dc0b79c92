"""Serves grpc.health.v1, which is open to unauthenticated callers: their messages and unread responses cost little
and block nothing."""

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

MAX_BYTES = 1024  # of a request; gRPC keeps it for the duration of the call
MAX_WATCHES = 1024  # at the same time; each takes some 20 KB in gRPC

Context = grpc.aio.ServicerContext[Any, Any]


class Health:
    """Health of one server. Watches follow the values set; set() never waits for them."""

    def __init__(self, max_watches: int = MAX_WATCHES) -> None:
        self._max_watches = max_watches
        self._statuses: dict[str, int] = {}
        self._changed = asyncio.Event()
        self._num_watches = 0

    def set(self, service: str, status: int) -> None:
        self._statuses[service] = status
        self._changed.set()
        self._changed = asyncio.Event()

    def handler(self) -> grpc.GenericRpcHandler:
        """Returns the gRPC handler of Check and Watch, to be added to a server."""
        return grpc.method_handlers_generic_handler(
            SERVICE_NAME,
            {
                "Check": grpc.unary_unary_rpc_method_handler(self._check, response_serializer=_answer),
                "Watch": grpc.unary_stream_rpc_method_handler(self._watch, response_serializer=_answer),
            },
        )

    async def _check(self, question: bytes, context: Context) -> int:
        """Returns the status of the requested service; aborts the call with NOT_FOUND for an unknown one."""
        status = self._statuses.get(await _service(question, context))
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return status

    async def _watch(self, question: bytes, context: Context) -> AsyncIterator[int]:
        """Yields the status of the requested service, UNKNOWN for an unknown one, at once and after each change.
        Aborts the call beyond the limit of watches."""
        service = await _service(question, context)
        if self._num_watches >= self._max_watches:
            text = f"{self._max_watches} watches are open, which is the limit; use Check instead"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._num_watches += 1
        try:
            sent = None
            while True:
                changed, status = self._changed, self._statuses.get(service, UNKNOWN)
                if status != sent:
                    yield status
                    sent = status
                await changed.wait()
        finally:
            self._num_watches -= 1


async def _service(question: bytes, context: Context) -> str:
    """Returns the requested service name; aborts a malformed call."""
    try:
        if len(question) <= MAX_BYTES:
            return str(pb.HealthCheckRequest.FromString(question).service)
    except DecodeError:
        pass
    text = f"a HealthCheckRequest of at most {MAX_BYTES} bytes is expected here"
    return str(await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text))


def _answer(status: int) -> bytes:
    return bytes(pb.HealthCheckResponse(status=status).SerializeToString())
