"""Request bodies: size checks before parsing, counts before validation."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from json import JSONDecodeError
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response
from starlette.types import Scope

from quire.services.frontend.bounds.bodies import json_body, json_scan, long_ids
from quire.services.frontend.bounds.bodies.heavy_work import HeavyWorkLimiter, in_steps
from quire.services.frontend.bounds.bodies.large_bodies import LargeBodies
from quire.services.frontend.bounds.bodies.spool import Spool
from quire.services.frontend.http.disconnect import while_connected
from quire.services.frontend.http.fields.unknown_fields import UnknownFields
from quire.services.frontend.http.headers import DECODED
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits

JSON, BYTES = "application/json", "application/octet-stream"
CONTENT_TYPE = b"content-type"
CLIENT_GONE = 499  # status for the log only; the client has disconnected
UNREAD = object()  # marks a missing document, since null is a valid one
Handler = Callable[[Request], Coroutine[Any, Any, Response]]
# (request, number of body bytes) -> length of the leading JSON part, or None if the headers announce no binary part.
# Raises InvalidArgument.
JsonBytes = Callable[[Request, int], int | None]


def json_only(request: Request, num_bytes: int) -> None:
    """The JsonBytes of bodies without a binary part."""


class BufferedRequest(Request):
    """A request whose body has been read. The bytes are dropped once they are parsed."""

    def __init__(
        self,
        request: Request,
        body: bytes,
        error: JSONDecodeError | None = None,
        ids_begin: int | None = None,
        tail: memoryview | None = None,
    ) -> None:
        """Wraps a request. `error`: why the body is not JSON, if known. `ids_begin`: offset of an extracted id list.
        `tail`: bytes after the JSON part, if the headers announced any."""
        super().__init__(request.scope if tail is None else _as_json(request.scope), request.receive)
        self.tail = tail
        self._ids = None if ids_begin is None else long_ids.unpack_ids(memoryview(body)[ids_begin:])
        body = body if ids_begin is None else body[:ids_begin]
        self._bytes = body
        self._document: Any = UNREAD
        self._error = error

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        """Returns the parsed body, parsing it at most once. Raises JSONDecodeError, which FastAPI reports."""
        if self._error is not None:
            raise self._error
        return json.loads(self._bytes) if self._document is UNREAD else self._document

    def parse(self) -> Any:
        """Parses the body, inserts extracted ids, and drops the bytes; returns None if it is not JSON, which json()
        reports. Raises InvalidArgument for what FastAPI cannot report."""
        if self._error is not None:
            return None
        try:
            self._document = json_body.parse(self._bytes)
        except JSONDecodeError as error:
            self._error = error
            return None
        if self._ids is not None:
            self._document[long_ids.FIELD] = self._ids
        self._bytes = b"{}" if self._bytes else b""
        return self._document


class BodyReader:
    """Reads and checks bodies within the request limits, large ones in another process."""

    def __init__(self, limits: RequestLimits, large: LargeBodies, unknown_fields: UnknownFields) -> None:
        self.unknown_fields = unknown_fields
        self._limits = limits
        self._large = large
        self._heavy = HeavyWorkLimiter()

    async def handle(
        self,
        request: Request,
        handler: Handler,
        *,
        at_once: bool = True,
        json_bytes: JsonBytes = json_only,
        any_type: bool = False,
    ) -> Response:
        """Reads and checks the body and calls `handler`. `at_once`: the handler does its work without waiting, so the
        loop's slot is kept for it; otherwise a client that disconnects before the answer cancels it. `json_bytes`:
        returns the length of the JSON part. `any_type`: the body is JSON whatever its content type. Raises
        InvalidArgument."""
        with Spool() as spool:
            async for chunk in request.stream():  # request.body() would keep all chunks
                spool.append(chunk)
            num_bytes, is_checked, error = spool.num_bytes, False, None
            num_json = json_bytes(request, num_bytes)
            _check_type(request, (JSON,) if num_json is None else (JSON, BYTES), any_type=any_type)
            if any_type:
                request = Request(_as_json(request.scope), request.receive)
            try:
                is_checked = await self._large.check(spool, num_json=num_json)
            except JSONDecodeError as found:
                error = found
            async with self._heavy.slot(num_bytes if error is None else 0):
                body, tail = _split_body(spool.take_all() if error is None else b"?", num_json)
                read = BufferedRequest(request, body, error, spool.ids_begin, tail)
                if is_checked:
                    read.parse()
                else:
                    await self._check(read)
                if (decoded := request.scope.get(DECODED)) is not None:
                    decoded.release()
                if at_once:
                    return await handler(read)
        async with while_connected(request.receive):
            return await handler(read)
        return Response(status_code=CLIENT_GONE)

    def route(self, *, at_once: bool = True) -> type[APIRoute]:
        """Returns a route class whose bodies are read by handle() before the handler runs. `at_once`: see handle()."""
        bounds = self

        class BoundedRoute(APIRoute):
            """A route that reads and checks the body before its handler runs."""

            def get_route_handler(self) -> Handler:
                """Returns FastAPI's handler with the body read and checked before."""
                handler = super().get_route_handler()

                async def guarded(request: Request) -> Response:
                    return await bounds.handle(request, handler, at_once=at_once)

                return guarded

        return BoundedRoute

    async def _check(self, request: BufferedRequest) -> None:
        """Checks the nesting, counts and texts of a body in this process, in steps; the body of a request that is not
        JSON passes. Raises InvalidArgument."""
        body = await request.body()
        await in_steps(json_scan.check(body, self._limits))
        document = request.parse()
        json_body.check(document, body, self._limits)


def binary_part(request: Request) -> memoryview | None:
    """Returns the bytes after the JSON part of a body; None if no header announced any."""
    return request.tail if isinstance(request, BufferedRequest) else None


def _split_body(body: bytes, num_json: int | None) -> tuple[bytes, memoryview | None]:
    return (body, None) if num_json is None else (body[:num_json], memoryview(body)[num_json:])


def _as_json(scope: Scope) -> Scope:
    """Returns the scope with a JSON content type, since FastAPI interprets the remaining body by its content type."""
    headers = [(name, value) for name, value in scope["headers"] if name != CONTENT_TYPE]
    return {**scope, "headers": [*headers, (CONTENT_TYPE, JSON.encode())]}


def _check_type(request: Request, kinds: tuple[str, ...], *, any_type: bool) -> None:
    """Raises InvalidArgument unless the content type is JSON or missing. With `any_type`, only requests from web pages,
    which have an Origin header, are checked: browsers let any page send forms."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    is_json = kind in kinds or (kind.startswith("application/") and kind.endswith("+json"))
    if not is_json and not (any_type and "origin" not in request.headers):
        raise InvalidArgument(f"content-type is {kind!r}: send {JSON}", field="content-type")
