"""Limits for gRPC calls that gRPC itself would keep open indefinitely: calls without a request or with oversized
headers, and connections whose clients send such headers or reset calls repeatedly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio

from quire.shared.rpc.connection_resets import ConnectionResets

Context = grpc.aio.ServicerContext[Any, Any]
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"

HEADER_BYTES = 32 * 1024  # counted as in HTTP/2; gRPC enforces the limit itself once a client has acknowledged it
ENTRY_BYTES = 32
NO_MESSAGE = "the call ended without a request: exactly one message is expected"


class CallLimitInterceptor(grpc.aio.ServerInterceptor):
    """Outermost interceptor; replaces every handler by one that reads the request itself."""

    def __init__(self, patience_s: float, resets: ConnectionResets) -> None:
        """`patience_s`: time from a call's headers until its request is complete."""
        self._patience_s = patience_s
        self._resets = resets
        self._changed: dict[str, tuple[Handler, Handler]] = {}  # by method: original and wrapped handler
        self._unknown = self._bounded(grpc.stream_stream_rpc_method_handler(_refuse_unknown))
        self._too_large: Handler = grpc.stream_stream_rpc_method_handler(self._refuse_headers)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        """Returns the wrapped handler of a method, made once, or a handler that refuses the call, for unknown
        methods and for oversized headers."""
        if not _fits(handler_call_details.invocation_metadata or ()):
            return self._too_large
        handler = await continuation(handler_call_details)
        if handler is None:
            return self._unknown
        method = handler_call_details.method
        known, changed = self._changed.get(method, (None, None))
        if known is not handler or changed is None:
            changed = self._bounded(handler)
            self._changed[method] = handler, changed
        return changed

    def _bounded(self, handler: Any) -> Handler:
        """Returns a handler that takes every request as a stream, so that it waits for the request itself, for a
        limited time."""
        changed = dict.fromkeys(("unary_unary", "unary_stream", "stream_unary", "stream_stream"))
        streams = handler.request_streaming
        if handler.response_streaming:
            behaviour = handler.stream_stream if streams else handler.unary_stream
            changed["stream_stream"] = self._streaming(behaviour, reads=not streams)
        else:
            behaviour = handler.stream_unary if streams else handler.unary_unary
            changed["stream_unary"] = self._answering(behaviour, reads=not streams)
        return handler._replace(request_streaming=True, **changed)  # type: ignore[no-any-return]

    def _answering(self, behaviour: Any, *, reads: bool) -> Any:
        """Wraps a unary response. `reads`: the handler takes a single request."""

        async def answer(requests: AsyncIterator[Any], context: Context) -> Any:
            with self._counting_resets(context):
                return await behaviour(await self._request(requests, context) if reads else requests, context)

        return answer

    def _streaming(self, behaviour: Any, *, reads: bool) -> Any:
        """Wraps a streamed response; a handler either yields its responses or writes them to the context."""

        async def write(requests: AsyncIterator[Any], context: Context) -> None:
            """Runs the handler and writes the responses that it yields, if it yields any; the call's resets are
            counted."""
            with self._counting_resets(context):
                found = behaviour(await self._request(requests, context) if reads else requests, context)
                if hasattr(found, "__aiter__"):
                    async for answer in found:
                        await context.write(answer)
                else:
                    await found

        return write

    @contextmanager
    def _counting_resets(self, context: Context) -> Iterator[None]:
        """Surrounds the handler of a call: counts the call against its peer if the client resets it, and raises the
        error again. A reset shows as the task's cancellation, or as InternalError when the handler writes."""
        peer = context.peer()  # not available after the call
        try:
            yield
        except (asyncio.CancelledError, grpc.aio.InternalError):
            self._resets.add(peer)
            raise

    async def _refuse_headers(self, _requests: AsyncIterator[Any], context: Context) -> None:
        """Refuses the call and closes its connection. Such headers pass gRPC's own limit only if the client has not
        acknowledged it; each may cost as much as thousands of calls, and more may follow."""
        text = f"the call's headers take more than {HEADER_BYTES} bytes"
        peer = context.peer()
        try:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        finally:
            self._resets.end(peer, text)

    async def _request(self, requests: AsyncIterator[Any], context: Context) -> Any:
        """Returns the call's single request. Aborts the call if none arrives in time, or if the client closes its
        side without one."""
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


async def _refuse_unknown(_requests: AsyncIterator[Any], context: Context) -> None:
    await context.abort(grpc.StatusCode.UNIMPLEMENTED, "Method not found!")
