"""Bodies of calls: measured before they are parsed, and counted before anybody looks at their fields."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from services.frontend.bounds import counts, json_scan
from services.frontend.bounds.heavy import HeavyWork, in_steps
from services.frontend.http import text
from services.frontend.http.disconnect import while_connected
from shared.errors import InvalidArgument
from shared.settings.request_limits import RequestLimits

JSON = "application/json"
PLAIN = "identity"
CLIENT_GONE = 499  # nobody reads it
Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class ReadRequest(Request):
    """Its body has been read. Once that is known as JSON, the bytes are given up."""

    def __init__(self, request: Request, body: bytes) -> None:
        super().__init__(request.scope, request.receive)
        self._bytes = body
        self._document: Any = None

    async def body(self) -> bytes:
        return self._bytes

    async def json(self) -> Any:
        return json.loads(self._bytes) if self._document is None else self._document

    def parse(self) -> Any:
        """None, and what it is stays unknown, if it is no JSON: FastAPI words that, and asks again. InvalidArgument for
        what FastAPI has no words for."""
        try:
            self._document = json.loads(self._bytes)
        except json.JSONDecodeError:
            return None
        except (ValueError, RecursionError) as error:  # half a character, a number of thousands of digits
            reason = str(error).partition(";")[0]
            raise InvalidArgument(f"the body is not JSON: {reason}") from None
        self._bytes = b"{}" if self._bytes else b""
        return self._document


class BodyBounds:
    """Reads bodies within the limits of a request."""

    def __init__(self, limits: RequestLimits) -> None:
        self._limits = limits
        self._heavy = HeavyWork()

    async def handle(self, request: Request, handler: Handler, *, at_once: bool = True) -> Response:
        """What `handler` answers, which does its work `at_once`, or else waits for others. Raises InvalidArgument."""
        # Not request.body(), which keeps them.
        body = b"".join([chunk async for chunk in request.stream()])
        num_bytes, read = len(body), ReadRequest(request, body)
        del body
        async with self._heavy.turn(num_bytes):
            await self._check(read, num_bytes)
            if at_once:
                return await handler(read)
        async with while_connected(request.receive):
            return await handler(read)
        return Response(status_code=CLIENT_GONE)

    def route(self, *, at_once: bool = True) -> type[APIRoute]:
        """The kind of route whose bodies are read here."""
        bounds = self

        class BoundedRoute(APIRoute):
            """Reads, then does what it did."""

            def get_route_handler(self) -> Handler:
                handler = super().get_route_handler()

                async def guarded(request: Request) -> Response:
                    return await bounds.handle(request, handler, at_once=at_once)

                return guarded

        return BoundedRoute

    async def _check(self, request: ReadRequest, num_bytes: int) -> None:
        _check_type(request)
        body = await request.body()
        await in_steps(json_scan.check(body, self._limits))
        document = request.parse()
        counts.check_body(document, num_bytes, self._limits)
        text.check(body, document)


def _check_type(request: Request) -> None:
    """Bodies are JSON; who says nothing of its kind means that."""
    kind = request.headers.get("content-type", JSON).partition(";")[0].strip().lower()
    if kind != JSON and not (kind.startswith("application/") and kind.endswith("+json")):
        raise InvalidArgument(f"content-type is {kind!r}: bodies are {JSON}", field="content-type")
    packed = request.headers.get("content-encoding", PLAIN).strip().lower()
    if packed != PLAIN:
        raise InvalidArgument(f"content-encoding is {packed!r}: bodies are not packed", field="content-encoding")
