"""Middleware that checks API keys, operators' keys, browser origins and body sizes; plain ASGI, so it sees every
chunk."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable, Mapping

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.services.frontend.access.access import Access
from quire.services.frontend.calls.calls import Call
from quire.services.frontend.http.headers import CALL, Headers
from quire.services.frontend.http.middleware.page_rules import PROBES, PageRules
from quire.shared.errors import QuireError

OPERATORS = (  # paths that require the operators' key
    "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter",
    "/pause",
    "/resume",
    "/is_paused",
    "/sleep",
    "/wake_up",
    "/is_sleeping",
    "/update_weights_from_disk",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/destroy_weights_update_group",
)
DRAIN_FACTOR = 4  # bodies up to this multiple of the limit are drained, so that the client reads the refusal
DRAIN_TIMEOUT_S = 1.0


class BodyLimit:
    """Refuses bodies of more than `max_bytes` with 413; a body with a larger announced length is not stored."""

    def __init__(self, app: ASGIApp, max_bytes: int, of_paths: Mapping[str, int] | None = None) -> None:
        """Wraps `app`. `max_bytes`: limit of a body; `of_paths`: paths with another limit."""
        self._app = app
        self._max_bytes = max_bytes
        self._of_paths = of_paths or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app with a receive callable that raises HTTPException 413 for a body beyond the limit. One
        announced with at most DRAIN_FACTOR times the limit is drained first, so that the client reads the answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        max_bytes = self._of_paths.get(scope["path"], self._max_bytes)
        headers = dict(scope["headers"])
        announced = int(headers.get(b"content-length", b"0"))
        expects_continue = b"expect" in headers
        num_bytes = 0

        async def limited() -> Message:
            """Receives the next message. Raises HTTPException 413 if the body's announced or received length exceeds
            the limit."""
            nonlocal num_bytes
            if max_bytes < announced <= DRAIN_FACTOR * max_bytes and not expects_continue:
                await drain_body(receive)
            _check_length(announced, max_bytes)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            _check_length(num_bytes, max_bytes)
            return message

        await self._app(scope, limited, send)


def _check_length(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise HTTPException(413, f"the body has more than {max_bytes} bytes")


async def drain_body(receive: Receive) -> None:
    """Reads and drops the rest of a body for at most DRAIN_TIMEOUT_S: if the connection were closed while the client
    still writes, it would lose the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DRAIN_TIMEOUT_S):
            while (await receive()).get("more_body"):
                pass


class PageGuard:
    """Refuses calls that web pages must not make, before anything else is checked."""

    def __init__(self, app: ASGIApp, rules: PageRules, refusal: Callable[[str, QuireError], Response]) -> None:
        self._app = app
        self._rules = rules
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app if the page rules permit the call, else answers with the refusal."""
        if scope["type"] == "http":
            try:
                self._rules.check(scope["method"], scope["path"], scope["headers"], scope["http_version"])
            except QuireError as error:
                scope[CALL].error = error
                await self._refusal(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class OperatorGuard:
    """Requires the operators' key on operators' paths, before the bodies are read."""

    def __init__(
        self, app: ASGIApp, check: Callable[[Headers], None], refusal: Callable[[str, QuireError], Response]
    ) -> None:
        """Wraps `app`. `check`: raises QuireError for headers without the operators' key."""
        self._app = app
        self._check = check
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app unless the path is an operators' path and the key is missing or wrong; that is refused."""
        if scope["type"] == "http" and scope["path"] in OPERATORS:
            try:
                self._check(scope["headers"])
            except QuireError as error:
                scope[CALL].error = error
                await self._refusal(scope["path"], error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class KeyGuard:
    """Requires an API key on every path except `open_paths`; without configured keys every call passes."""

    def __init__(
        self, app: ASGIApp, access: Access, open_paths: Iterable[str], refusal: Callable[[str, QuireError], Response]
    ) -> None:
        """Wraps `app`. `refusal`: formats an error for the clients of a path."""
        self._app = app
        self._access = access
        self._open = frozenset((*PROBES, *OPERATORS, *open_paths))
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Authenticates the call, notes its caller, and calls the app; refuses a call without a valid key with
        `www-authenticate: Bearer`."""
        if scope["type"] == "http" and scope["path"] not in self._open:
            call: Call = scope[CALL]
            try:
                call.caller = self._access.caller_from_headers(scope["headers"])
            except QuireError as error:
                call.error = error
                response = self._refusal(scope["path"], error)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)
