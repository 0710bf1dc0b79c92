"""Resumable HTTP streams, which outlive their calls: their creation, and /v1/streams."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from fastapi import Query, Request
from pydantic import BaseModel
from starlette.responses import Response

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.http import headers
from quire.services.frontend.http.headers import TIMEOUT
from quire.services.frontend.http.responses import ResponseFormatter
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.stream_responses import EventMessageWriter, StreamResponse
from quire.services.frontend.openai_edge.answers.chunks import ErrorEvents
from quire.services.frontend.request.call_headers import CallHeaders
from quire.services.frontend.request.request import Request as GeneratorRequest
from quire.services.frontend.streams.local_stream import RestoredRequest
from quire.services.frontend.streams.store import DELETED_S
from quire.services.frontend.streams.stream import Stream
from quire.services.frontend.streams.streams import Streams
from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.pb.frontend.v1 import stream_pb2

STREAMS = "/v1/streams/{request_id}"
NOTHING_MORE: dict[int | str, dict[str, Any]] = {
    204: {"description": "The stream has ended, and no event follows the given one"}
}
LAST_EVENT = "last-event-id"


class FormattedRequest(NamedTuple):
    """Request and the format of its answer."""

    request: GeneratorRequest
    format: ResponseFormatter


RequestFactory = Callable[[bytes, CallHeaders, int], FormattedRequest]
"""Builds the request from the body, its headers, and its arrival (seconds since 1970)."""


class NewStream(NamedTuple):
    """Function that begins a stream, and its request."""

    begin: Callable[[Call], Awaitable[Stream]]
    formatted: FormattedRequest


class ResumableHttp:
    """Resumable streams of one frontend. A stream's kind is the path of the call that began it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.router = Router(tags=["streams"], own_query=True)
        self.router.add_api_route(
            STREAMS, self.attach, methods=["GET"], response_class=Response, responses=NOTHING_MORE
        )
        self.router.add_api_route(STREAMS, self.cancel, methods=["DELETE"])

    def register(self, kind: str, factory: RequestFactory) -> None:
        """Registers how a stream of this kind is restored from its stored request."""

        def restore(kept: stream_pb2.KeptRequest) -> RestoredRequest:
            sent = CallHeaders(kept.request_id, kept.tenant, None, asyncio.get_running_loop().time())
            formatted = factory(kept.body, sent, kept.created_unix_s)
            return RestoredRequest(formatted.request, EventMessageWriter(formatted.format))

        self._streams.register_restorers({kind: restore})

    def answer(
        self, kind: str, body: BaseModel, sent: CallHeaders, factory: RequestFactory, asked_s: float | None = None
    ) -> Response:
        """Returns the response that creates a stream of `kind` and sends its events. `asked_s` is the retention in
        the body in seconds; raises InvalidArgument if the request is invalid or the call has a timeout."""
        begin, (request, answer_format) = self.prepare_stream(kind, body, sent, factory, asked_s)
        return StreamResponse(self._streams, begin, 0, answer_format, request.structured_output_field)

    def prepare_stream(
        self,
        kind: str,
        body: BaseModel,
        sent: CallHeaders,
        factory: RequestFactory,
        asked_s: float | None = None,
        *,
        runs_unread: bool = False,
    ) -> NewStream:
        """Checks a request and returns the function that begins its stream, with the request and format.
        `runs_unread` lets the stream run to its end without a reader. Raises InvalidArgument if the call has a
        timeout, which a stream would outlive."""
        retention_s = self._streams.policy.retention_for_s(asked_s or 0)
        if sent.timeout_s is not None:
            raise InvalidArgument(
                f"{TIMEOUT} cannot be combined with a resumable stream, which outlives its call; got "
                f"{sent.timeout_s:g}",
                field=TIMEOUT,
            )
        written = body.model_dump_json(exclude_unset=True, fallback=list).encode()
        created_unix_s = int(time.time())
        formatted = factory(written, sent, created_unix_s)
        kept = stream_pb2.KeptRequest(
            kind=kind,
            body=written,
            retention_ms=round(1000 * retention_s),
            created_unix_s=created_unix_s,
            runs_unread=runs_unread,
        )

        async def begin(call: Call) -> Stream:
            return await self._streams.begin(kept, formatted.request, EventMessageWriter(formatted.format), call)

        return NewStream(begin, formatted)

    async def attach(self, request_id: str, http: Request, starting_after: int = Query(-1, ge=-1)) -> Response:
        """Returns a stream's events after a given one, or all of them, and follows the stream."""
        return self.resumed(request_id, http, _offset(http, starting_after))

    def resumed(self, request_id: str, http: Request, offset: int, kind: str = "") -> Response:
        """Returns the response that sends the events of an existing stream from `offset` on. A missing stream, or
        one of another kind than `kind` ("" accepts all), is answered with NotFound."""

        async def find(_: Call) -> Stream:
            """Attaches to the tenant's stream; raises NotFound if it does not exist or belongs to another endpoint
            than `kind`."""
            stream = await self._streams.attach(headers.tenant(http), request_id)
            if kind and stream.kind != kind:
                raise NotFound(f"request_id: {request_id!r} is a stream of {stream.kind}", field="request_id")
            return stream

        return StreamResponse(self._streams, find, offset, ErrorEvents(), "")

    async def newest(self, request_id: str, tenant: str) -> Stream:
        """Returns the tenant's stream after reading all events that it has so far; raises NotFound if it does not
        exist."""
        stream = await self._streams.find(tenant, request_id)
        await self._streams.refresh(stream)
        return stream

    async def is_deleted(self, request_id: str, tenant: str) -> bool:
        """Returns whether any frontend has deleted the stream, so that copies of its events must be dropped."""
        return await self._streams.is_deleted(tenant, request_id)

    def may_be_copied(self, created_unix_s: int) -> bool:
        """Returns whether the deletion of a stream of that age would still be known."""
        return not self._streams.is_shared or time.time() - created_unix_s < DELETED_S

    async def delete(self, stream: Stream) -> None:
        """Deletes an ended stream; raises FailedPrecondition otherwise."""
        await self._streams.delete(stream)

    async def cancel(self, request_id: str, http: Request) -> dict[str, Any]:
        """Cancels a stream by its request id."""
        await self._streams.cancel(headers.tenant(http), request_id)
        return {"id": request_id, "object": "stream", "cancelled": True}


def _offset(http: Request, starting_after: int) -> int:
    """Returns the offset; a reconnecting browser sends the id of its last event."""
    last = http.headers.get(LAST_EVENT)
    if last is None:
        return starting_after + 1
    if not (last.isascii() and last.isdigit() and len(last) < 16):
        raise InvalidArgument(f"{LAST_EVENT} must be the id of an event, got {last!r}", field=LAST_EVENT)
    return int(last) + 1
