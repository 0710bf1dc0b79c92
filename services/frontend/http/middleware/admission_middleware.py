"""Admission of HTTP calls: calls beyond the limits are refused by their headers, before any body is read or parsed."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.services.frontend.access.rate_limit import rate_limit_headers
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.http.headers import CALL, HANDLER, Headers, client_request_id, request_id_headers
from quire.services.frontend.http.server.protocol import SerializedResponse
from quire.shared.errors import QuireError
from quire.shared.metrics.frontend import FrontendMetrics

MAX_CACHED_REFUSALS = 64


class AdmissionMiddleware:
    """Admits inference calls. The protocol asks `refuse()` before it creates a call; an accepted call acquires its
    lease once its body has arrived, unless that is a file, and waits for its turn."""

    def __init__(
        self, app: ASGIApp, admission: CallAdmission, calls: Calls, metrics: FrontendMetrics, dialects: Dialects
    ) -> None:
        self._app = app
        self._admission = admission
        self._calls = calls
        self._metrics = metrics
        self._dialects = dialects
        self._refusals: dict[tuple[str, str, str], SerializedResponse] = {}
        self._num_arriving = 0  # accepted in this event loop iteration, without a lease yet

    def is_full(self) -> bool:
        """Whether inference calls of every tenant are refused at present."""
        return self._admission.is_full(self._num_arriving)

    def refuse(self, method: bytes, target: bytes, headers: Headers) -> bytes | None:
        """Returns the serialized refusal of an inference call beyond its tenant's limits, counted and logged, or None
        to accept it; an accepted one counts as arriving. `target`: path and query."""
        path = target.partition(b"?")[0].decode("latin-1")
        metric_path = self._dialects.inference_path(path) if method == b"POST" else ""
        if not metric_path:
            return None
        tenant = self._calls.access.tenant_from_headers(headers)
        try:
            self._admission.check_open(self._num_arriving, tenant)
        except QuireError as error:
            refusal = self._serialized(path, error)
            self._metrics.http_requests.labels(metric_path, "POST", f"{refusal.status // 100}xx").inc()
            self._calls.log_refusal(f"POST {metric_path}", str(refusal.status), None, tenant)
            limits = rate_limit_headers(self._admission.rate_limits(tenant))
            return refusal.with_headers([*request_id_headers(client_request_id(headers)), *limits])
        self._note_arrival()
        return None

    def _serialized(self, path: str, error: QuireError) -> SerializedResponse:
        """Returns the serialized refusal; cached, since hundreds of calls get the same one while the frontend is
        full."""
        key = (path, type(error).__name__, error.message)
        if key not in self._refusals:
            if len(self._refusals) >= MAX_CACHED_REFUSALS:
                self._refusals.clear()
            self._refusals[key] = SerializedResponse.from_response(self._dialects.refusal(path, error))
        return self._refusals[key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body of an inference call, then admits it and calls the app, or answers with the refusal. Other
        calls pass."""
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        metric_path = self._dialects.inference_path(scope["path"]) if is_post else ""
        if not metric_path:
            await self._app(scope, receive, send)
            return
        scope[HANDLER] = metric_path
        call: Call = scope[CALL]
        try:
            if not self._dialects.takes_file(scope["path"]):
                receive = await _buffer(receive)
            await call.admit()
        except QuireError as error:
            call.error = error
            await self._dialects.refusal(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _note_arrival(self) -> None:
        """Counts a call that was let through in this loop iteration and has no lease yet; the next iteration resets the
        count."""
        if not self._num_arriving:
            asyncio.get_running_loop().call_soon(self._reset_arrivals)
        self._num_arriving += 1

    def _reset_arrivals(self) -> None:
        self._num_arriving = 0


async def _buffer(receive: Receive) -> Receive:
    """Reads the whole body and returns a receive callable that replays it, including an error while reading."""
    messages: list[Message] = []
    failure: Exception | None = None
    try:
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
    except Exception as error:  # such as a body that is too long; the route formats it
        failure = error
    messages.reverse()

    async def replay() -> Message:
        """Returns the read body once, then raises the error that reading ended with, or receives further messages."""
        if messages:
            return messages.pop()
        if failure is not None:
            raise failure
        return await receive()

    return replay
