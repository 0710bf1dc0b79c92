"""Ends calls that gRPC itself keeps for as long as their client likes: without a request, or with too many headers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import grpc
import grpc.aio

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

HEADER_BYTES = 32 * 1024  # as HTTP/2 counts them; gRPC looks at them itself once a client has acknowledged that limit
ENTRY_BYTES = 32
NO_MESSAGE = "the call ended without its request: exactly one message is expected"


class CallBounds(grpc.aio.ServerInterceptor):
    """The outermost interceptor: it changes the handlers of single requests into such as read theirs themselves."""

    def __init__(self, patience_s: float) -> None:
        """`patience_s`: from a call's headers until its request is complete."""
        self._patience_s = patience_s
        self._changed: dict[str, tuple[Handler, Handler]] = {}  # by method: what came, and what it became

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        if not _fits(handler_call_details.invocation_metadata or ()):
            return TOO_MANY_HEADERS
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        method = handler_call_details.method
        known, changed = self._changed.get(method, (None, None))
        if known is not handler or changed is None:
            changed = self._reading(handler)
            self._changed[method] = handler, changed
        return changed

    def _reading(self, handler: Any) -> Handler:
        changed = {"request_streaming": True, "unary_unary": None, "unary_stream": None}
        if handler.response_streaming:
            return handler._replace(**changed, stream_stream=self._streaming(handler.unary_stream))  # type: ignore[no-any-return]
        return handler._replace(**changed, stream_unary=self._answering(handler.unary_unary))  # type: ignore[no-any-return]

    def _answering(self, behaviour: Any) -> Any:
        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            return await behaviour(await self._request(requests, context), context)

        return answer

    def _streaming(self, behaviour: Any) -> Any:
        """A behaviour either yields its answers or writes them to the context."""

        async def write(requests: AsyncIterator[Any], context: Context) -> None:
            found = behaviour(await self._request(requests, context), context)
            if hasattr(found, "__aiter__"):
                async for answer in found:
                    await context.write(answer)
            else:
                await found

        return write

    async def _request(self, requests: AsyncIterator[Any], context: Context) -> Any:
        try:
            async with asyncio.timeout(self._patience_s):
                async for request in requests:
                    return request
        except TimeoutError:
            late = f"no request came within {self._patience_s:g} s of the call's headers"
            return await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, late)
        return await context.abort(grpc.StatusCode.INVALID_ARGUMENT, NO_MESSAGE)


def _fits(metadata: Sequence[tuple[str, str | bytes]]) -> bool:
    if len(metadata) * ENTRY_BYTES > HEADER_BYTES:
        return False
    return sum(len(name) + len(value) + ENTRY_BYTES for name, value in metadata) <= HEADER_BYTES


async def _refuse(_requests: AsyncIterator[Any], context: Context) -> None:
    text = f"the call's headers take more than {HEADER_BYTES} bytes"
    await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)


TOO_MANY_HEADERS: Handler = grpc.stream_stream_rpc_method_handler(_refuse)
