"""Interceptor that limits clients' messages: fields are counted before parsing, lists before conversion."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from quire.services.frontend.bounds import messages, wire_scan
from quire.services.frontend.bounds.bodies.heavy_work import HEAVY_BYTES, HeavyWorkLimiter, in_steps
from quire.services.frontend.bounds.bodies.large_bodies import LargeBodies
from quire.services.frontend.bounds.bodies.spool import Spool
from quire.services.frontend.bounds.smallest_first import SmallestFirstLimiter
from quire.services.frontend.calls.calls import Calls
from quire.services.frontend.grpc_edge.errors import Context, call_context
from quire.shared.errors import QuireError
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.settings.request_limits import RequestLimits

Behaviour = Callable[[Any, Context], Awaitable[Any]]
SLICE_BYTES = 1 << 18  # copied in a tenth of a millisecond


class BoundedMessages(grpc.aio.ServerInterceptor):
    """Interceptor that checks and parses the messages of client-facing methods within the request limits."""

    def __init__(self, limits: RequestLimits, large: LargeBodies, calls: Calls, metrics: FrontendMetrics) -> None:
        self._limits = limits
        self._calls = calls
        self._metrics = metrics
        self._large = large
        self._heavy = HeavyWorkLimiter()
        self._copies = SmallestFirstLimiter(1)
        self._bounded_handlers: dict[str, tuple[Any, Any]] = {}  # method path -> (handler, handler with checks)

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: grpc.HandlerCallDetails
    ) -> Any:
        """Returns the handler with parsing under limits; other methods keep their own. Wrapped handlers are cached by
        method."""
        handler = await continuation(handler_call_details)
        request_class = messages.REQUESTS.get(handler_call_details.method)
        if handler is None or request_class is None:
            return handler
        original, bounded = self._bounded_handlers.get(handler_call_details.method, (None, None))
        if original is not handler:
            bounded = self._bound(handler_call_details.method, handler, request_class)
            self._bounded_handlers[handler_call_details.method] = handler, bounded
        return bounded

    def _bound(self, path: str, handler: Any, kind: type[Message]) -> Any:
        """Returns the handler with the raw bytes as its input and parsing in front of its behaviour. `path`: of the
        method."""
        changed: dict[str, Any] = {"request_deserializer": None}
        method = path.rpartition("/")[2]
        if handler.request_streaming:
            name = "stream_stream" if handler.response_streaming else "stream_unary"
            changed[name] = self._bounded_stream(getattr(handler, name), kind)
        else:
            name = "unary_stream" if handler.response_streaming else "unary_unary"
            changed[name] = self._bounded(method, getattr(handler, name), kind)
        return handler._replace(**changed)

    def _bounded_stream(self, behaviour: Behaviour, kind: type[Message]) -> Behaviour:
        """Wraps the behaviour of a request stream, whose messages are checked one by one: its reader gets the error of
        a refused message."""

        async def parsed(stream: AsyncIterator[bytes]) -> AsyncIterator[Message]:
            async for data in stream:
                yield await self.parse(data, kind)

        async def answered(stream: AsyncIterator[bytes], context: Context) -> Any:
            return await behaviour(parsed(stream), context)

        return answered

    def _bounded(self, method: str, behaviour: Behaviour, kind: type[Message]) -> Behaviour:
        """Wraps the behaviour of a single request message: a refused one ends the call with its error, counted and
        logged under `method`."""

        async def parsed(data: bytes, context: Context) -> Any:
            """Parses the message and calls the behaviour with it. Raises QuireError for a refused message, within a
            Call."""
            try:
                message = await self.parse(data, kind)
            except QuireError as error:
                async with call_context(method, context, self._metrics, self._calls):
                    raise error from None
            return await behaviour(message, context)

        return parsed

    async def parse(self, data: bytes, kind: type[Message]) -> Message:
        """Checks and parses a message, a large one checked in the other process. `kind`: its class. Raises
        InvalidArgument."""
        is_checked = len(data) > HEAVY_BYTES and await self._check_in_process(data, kind)
        async with self._heavy.slot(len(data)):
            if is_checked:
                return messages.parse(data, kind)
            await in_steps(wire_scan.check(data, kind.DESCRIPTOR, self._limits))
            message = messages.parse(data, kind)
            messages.check(message, self._limits)
            return message

    async def _check_in_process(self, data: bytes, kind: type[Message]) -> bool:
        """Copies a large message to a spool and has the child process check it; returns whether it was checked. Raises
        InvalidArgument."""
        with Spool() as spool:
            async with self._copies.slot(len(data)):  # one copy at a time, so that a loop iteration copies one slice
                await self._copy(data, spool)
            return await self._large.check(spool, kind.DESCRIPTOR.full_name)

    @staticmethod
    async def _copy(data: bytes, spool: Spool) -> None:
        """Copies `data` to the spool slice by slice, yielding to the event loop in between."""
        with memoryview(data) as view:
            for start in range(0, len(data), SLICE_BYTES):
                spool.append(view[start : start + SLICE_BYTES])
                await asyncio.sleep(0)
