"""Calls that nothing has room for are refused from their headers: no body is read, nothing is parsed."""

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

MAX_WORDED = 64  # refusals that are kept as they are written


class AdmissionMiddleware:
    """`refuse()` is asked before there is a call; a call that comes in takes a place once its body is there, and waits
    for its turn."""

    def __init__(
        self, app: ASGIApp, admission: CallAdmission, calls: Calls, metrics: FrontendMetrics, dialects: Dialects
    ) -> None:
        self._app = app
        self._admission = admission
        self._calls = calls
        self._metrics = metrics
        self._dialects = dialects
        self._worded: dict[tuple[str, str, str], SerializedResponse] = {}
        self._num_arriving = 0  # let in during this turn of the event loop, without a place yet

    def is_full(self) -> bool:
        """Whether work is refused at present, whoever asks."""
        return self._admission.is_full(self._num_arriving)

    def refuse(self, method: bytes, target: bytes, headers: Headers) -> bytes | None:
        """The whole answer to a call that nothing has room for; None to let it in."""
        path = target.partition(b"?")[0].decode("latin-1")
        known_as = self._dialects.inference_path(path) if method == b"POST" else ""
        if not known_as:
            return None
        tenant = self._calls.access.tenant_from_headers(headers)
        try:
            self._admission.check_open(self._num_arriving, tenant)
        except QuireError as error:
            written = self._written(path, error)
            self._metrics.http_requests.labels(known_as, "POST", f"{written.status // 100}xx").inc()
            self._calls.log_refusal(f"POST {known_as}", str(written.status))
            limits = rate_limit_headers(self._admission.rate_limits(tenant))
            return written.with_headers([*request_id_headers(client_request_id(headers)), *limits])
        self._arrives()
        return None

    def _written(self, path: str, error: QuireError) -> SerializedResponse:
        """While there is no room, hundreds are told the same."""
        key = (path, type(error).__name__, error.message)
        if key not in self._worded:
            if len(self._worded) >= MAX_WORDED:
                self._worded.clear()
            self._worded[key] = SerializedResponse.from_response(self._dialects.refusal(path, error))
        return self._worded[key]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        known_as = self._dialects.inference_path(scope["path"]) if is_post else ""
        if not known_as:
            await self._app(scope, receive, send)
            return
        scope[HANDLER] = known_as
        call: Call = scope[CALL]
        try:
            receive = await _read(receive)
            await call.admit()
        except QuireError as error:
            call.error = error
            await self._dialects.refusal(scope["path"], error)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _arrives(self) -> None:
        if not self._num_arriving:
            asyncio.get_running_loop().call_soon(self._all_have_arrived)
        self._num_arriving += 1

    def _all_have_arrived(self) -> None:
        self._num_arriving = 0


async def _read(receive: Receive) -> Receive:
    """Reads the body, and returns what it is to be read from once more: also where reading it fails."""
    messages: list[Message] = []
    failure: Exception | None = None
    try:
        while not messages or messages[-1].get("more_body", False):
            messages.append(await receive())
    except Exception as error:  # a body that is too long: the route words it
        failure = error
    messages.reverse()

    async def again() -> Message:
        if messages:
            return messages.pop()
        if failure is not None:
            raise failure
        return await receive()

    return again
