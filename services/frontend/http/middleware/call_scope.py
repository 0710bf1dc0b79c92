"""Outer middleware of every HTTP call: counts, times and logs it, adds id headers, and answers internal errors."""

from __future__ import annotations

import asyncio
import uuid

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.services.frontend.access.rate_limit import rate_limit_headers
from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.http.headers import (
    CALL,
    DIALECTS,
    HANDLER,
    KEEPALIVE,
    client_request_id,
    request_id_headers,
    traceparent,
)
from quire.shared.errors import Internal
from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics

log = logger("http")

CLIENT_GONE = 499  # nginx's status for a client that disconnected before the answer
UNKNOWN = "none"  # metric label of all unknown paths
PUBLIC = "/v1"  # GETs elsewhere come from operators and probes, and are not logged


class CallScope:
    """The middleware closest to the server: begins the Call of each HTTP request, and logs and counts it at its end."""

    def __init__(
        self,
        app: ASGIApp,
        calls: Calls,
        metrics: FrontendMetrics,
        dialects: Dialects,
        keepalive_s: float = 0.0,
    ) -> None:
        """Wraps `app`. `keepalive_s`: seconds of silence in a stream before a keep-alive."""
        self._app = app
        self._calls = calls
        self._metrics = metrics
        self._dialects = dialects
        self._keepalive_s = keepalive_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Runs the app within a new Call and adds the headers with the request id and the rate limits. An unexpected
        exception is logged and answered as an internal error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = 0

        async def send_with_headers(message: Message) -> None:
            """Adds the request id and, for inference calls, the rate limits to the response's headers."""
            nonlocal status
            if message["type"] == "http.response.start":
                more = [
                    *_id_headers(call, scope),
                    *(rate_limit_headers(call.rate_limits()) if HANDLER in scope else ()),
                ]
                status = message["status"]  # from here on no other response can start
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        with self._calls.begin() as call:
            scope[CALL] = call
            scope[DIALECTS] = self._dialects
            call.address = (scope.get("client") or ("",))[0]
            scope[KEEPALIVE] = self._keepalive_s
            call.traceparent = traceparent(scope["headers"])
            try:
                await self._app(scope, receive, send_with_headers)
            except ClientDisconnect:  # before the whole body was received
                status = CLIENT_GONE
            except Exception as fault:
                log.exception(
                    "call failed", request=call.id or client_request_id(scope["headers"]), route=_route(scope)
                )
                call.error = Internal(type(fault).__name__)
                if not status:
                    await self._dialects.refusal(scope["path"], Internal("internal error"))(
                        scope, receive, send_with_headers
                    )
            finally:
                self._end(call, scope, status or CLIENT_GONE)

    def _end(self, call: Call, scope: Scope, status: int) -> None:
        """Records the metrics of a call; only POST and public paths get a route, by which they are logged."""
        handler, method = _route(scope), scope["method"]
        self._metrics.http_requests.labels(handler, method, f"{status // 100}xx").inc()
        self._metrics.http_duration.labels(handler, method).observe(asyncio.get_running_loop().time() - call.started_s)
        if method == "POST" or scope["path"].startswith(PUBLIC):
            call.route, call.status = f"{method} {handler}", str(status)


def _id_headers(call: Call, scope: Scope) -> list[tuple[bytes, bytes]]:
    """Returns response headers with the request's id. If no request has been parsed, the id is the client's or a
    generated one, and is stored in `call.generated_id`."""
    if call.request is not None:
        return request_id_headers(call.request.request_id)
    call.generated_id = client_request_id(scope["headers"])
    if not (id_headers := request_id_headers(call.generated_id)):
        call.generated_id = uuid.uuid4().hex
        id_headers = request_id_headers(call.generated_id)
    return id_headers


def _route(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", None) or scope.get(HANDLER, UNKNOWN))
