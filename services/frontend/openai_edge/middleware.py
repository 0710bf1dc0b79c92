"""Around every HTTP call: the size of its body, the API key, the counts. Plain ASGI: they see every chunk there is."""

from __future__ import annotations

import asyncio
import hmac

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.openai_edge.errors import plain_response
from shared.metrics.frontend import FrontendMetrics

CLIENT_GONE = 499  # nginx's word for: the client left before there was a status


class BodyLimit:
    """Bodies of more than `max_bytes` are 413, before they are read where their length is announced."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            self._check(int(announced))
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, limited, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")


class ApiKey:
    """Calls under /v1 show `Authorization: Bearer <key>`."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._is_shown(scope):
            refusal = plain_response(401, "Unauthorized", "AuthenticationError")
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_shown(self, scope: Scope) -> bool:
        shown = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(shown, self._expected)


class Counts:
    """http_requests and http_request_duration_seconds, by route and by class of status."""

    def __init__(self, app: ASGIApp, metrics: FrontendMetrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        loop = asyncio.get_running_loop()
        started_s = loop.time()
        try:
            await self._app(scope, receive, watched)
        finally:
            self._count(scope, status, loop.time() - started_s)

    def _count(self, scope: Scope, status: int, duration_s: float) -> None:
        handler = getattr(scope.get("route"), "path", "none")  # a path nobody serves must not become a label
        self._metrics.http_requests.labels(handler, scope["method"], f"{status // 100}xx").inc()
        self._metrics.http_duration.labels(handler, scope["method"]).observe(duration_s)
