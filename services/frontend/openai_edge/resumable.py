"""Streams of the HTTP port that outlive their calls: how they are begun and gone on with, /v1/streams."""

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
from quire.services.frontend.http.headers import TIMEOUT, CallHeaders
from quire.services.frontend.http.responses import ResponseFormatter
from quire.services.frontend.http.router import Router
from quire.services.frontend.http.stream_responses import EventMessageWriter, StreamResponse
from quire.services.frontend.openai_edge.answers.chunks import ErrorEvents
from quire.services.frontend.request.request import Request as GeneratorRequest
from quire.services.frontend.streams.local_stream import RestoredRequest
from quire.services.frontend.streams.store import DELETED_S
from quire.services.frontend.streams.stream import Stream
from quire.services.frontend.streams.streams import Streams
from quire.shared.errors import InvalidArgument, NotFound
from quire.shared.pb.frontend.v1 import stream_pb2

STREAMS = "/v1/streams/{request_id}"
NOTHING_MORE: dict[int | str, dict[str, Any]] = {
    204: {"description": "It has ended, and nothing comes behind that event"}
}
LAST_EVENT = "last-event-id"


class FormattedRequest(NamedTuple):
    """A request, and how its answer is written."""

    request: GeneratorRequest
    format: ResponseFormatter


RequestFactory = Callable[[bytes, CallHeaders, int], FormattedRequest]
"""From the body, its headers, and when it came (seconds since 1970)."""


class NewStream(NamedTuple):
    """A stream that begins with its answer."""

    begin: Callable[[Call], Awaitable[Stream]]
    worded: FormattedRequest


class ResumableHttp:
    """Of one frontend. A stream's kind is the path of the call that began it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self.router = Router(tags=["streams"], own_query=True)
        self.router.add_api_route(
            STREAMS, self.attach, methods=["GET"], response_class=Response, responses=NOTHING_MORE
        )
        self.router.add_api_route(STREAMS, self.cancel, methods=["DELETE"])

    def offer(self, kind: str, again: RequestFactory) -> None:
        """How a stream of this kind is gone on with."""

        def remake(kept: stream_pb2.KeptRequest) -> RestoredRequest:
            sent = CallHeaders(kept.request_id, kept.tenant, None, asyncio.get_running_loop().time())
            found = again(kept.body, sent, kept.created_unix_s)
            return RestoredRequest(found.request, EventMessageWriter(found.format))

        self._streams.register_restorers({kind: remake})

    def answer(
        self, kind: str, body: BaseModel, sent: CallHeaders, again: RequestFactory, asked_s: float | None = None
    ) -> Response:
        """`asked_s`: its retention, if the body says one. Raises QuireError."""
        begin, (request, answer_format) = self.beginning(kind, body, sent, again, asked_s)
        return StreamResponse(self._streams, begin, 0, answer_format, request.structured_output_field)

    def beginning(
        self,
        kind: str,
        body: BaseModel,
        sent: CallHeaders,
        again: RequestFactory,
        asked_s: float | None = None,
        *,
        runs_unread: bool = False,
    ) -> NewStream:
        """`runs_unread`: to its end, though nobody reads it. Raises QuireError."""
        retention_s = self._streams.policy.retention_for_s(asked_s or 0)
        if sent.timeout_s is not None:
            raise InvalidArgument(
                f"{TIMEOUT} cannot go with a resumable stream, which outlives its call, got {sent.timeout_s:g}",
                field=TIMEOUT,
            )
        written = body.model_dump_json(exclude_unset=True, fallback=list).encode()
        created_unix_s = int(time.time())
        worded = again(written, sent, created_unix_s)
        kept = stream_pb2.KeptRequest(
            kind=kind,
            body=written,
            retention_ms=round(1000 * retention_s),
            created_unix_s=created_unix_s,
            runs_unread=runs_unread,
        )

        async def begin(call: Call) -> Stream:
            return await self._streams.begin(kept, worded.request, EventMessageWriter(worded.format), call)

        return NewStream(begin, worded)

    async def attach(self, request_id: str, http: Request, starting_after: int = Query(-1, ge=-1)) -> Response:
        """What a stream has told behind an event, or from its beginning, and what comes."""
        return self.resumed(request_id, http, _offset(http, starting_after))

    def resumed(self, request_id: str, http: Request, offset: int, kind: str = "") -> Response:
        """`kind`: that it has to be of; empty: any."""

        async def find(_: Call) -> Stream:
            stream = await self._streams.attach(headers.tenant(http), request_id)
            if kind and stream.kind != kind:
                raise NotFound(f"request_id: {request_id!r} was begun at {stream.kind}", field="request_id")
            return stream

        return StreamResponse(self._streams, find, offset, ErrorEvents(), "")

    async def newest(self, request_id: str, tenant: str) -> Stream:
        """A stream with all that it has said so far. Raises NotFound."""
        stream = await self._streams.find(tenant, request_id)
        await self._streams.refresh(stream)
        return stream

    async def is_deleted(self, request_id: str, tenant: str) -> bool:
        """A stream, by whichever frontend: copies of what it said are to be forgotten."""
        return await self._streams.is_deleted(tenant, request_id)

    def may_be_copied(self, created_unix_s: int) -> bool:
        """Whether one that began then would still be known to have been deleted."""
        return not self._streams.is_shared or time.time() - created_unix_s < DELETED_S

    async def delete(self, stream: Stream) -> None:
        """One that has ended. Raises FailedPrecondition."""
        await self._streams.delete(stream)

    async def cancel(self, request_id: str, http: Request) -> dict[str, Any]:
        """Ends a stream."""
        await self._streams.cancel(headers.tenant(http), request_id)
        return {"id": request_id, "object": "stream", "cancelled": True}


def _offset(http: Request, starting_after: int) -> int:
    """A browser that comes back says what it had last."""
    last = http.headers.get(LAST_EVENT)
    if last is None:
        return starting_after + 1
    if not (last.isascii() and last.isdigit() and len(last) < 16):
        raise InvalidArgument(f"{LAST_EVENT} must be the id of an event, got {last!r}", field=LAST_EVENT)
    return int(last) + 1
