"""CORS (https://fetch.spec.whatwg.org/#http-cors-protocol): lets pages of configured origins read answers.

Preflights are answered like every OPTIONS call, 204 with Allow (options.py); this middleware adds the headers that the
browser checks. Calls of other origins get no headers, so browsers block their pages.
"""

from __future__ import annotations

from collections.abc import Sequence

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.services.frontend.http.headers import REQUEST_ID, Headers, values_of
from quire.services.frontend.http.middleware.page_rules import ALL, PageRules

METHODS = b"GET, POST, DELETE, OPTIONS, HEAD"
EXPOSED = (
    REQUEST_ID,
    "retry-after",
    *(f"x-ratelimit-{part}-{kind}" for part in ("limit", "remaining", "reset") for kind in ("requests", "tokens")),
    "grpc-status",
    "grpc-message",
    "grpc-status-details-bin",
)
MAX_AGE_S = b"600"  # seconds for which a browser caches a preflight
ASKED_METHOD, ASKED_HEADERS = b"access-control-request-method", b"access-control-request-headers"
ASKED_PRIVATE = b"access-control-request-private-network"


class Cors:
    """Adds CORS headers to the answers of `app` for pages that the rules permit."""

    def __init__(self, app: ASGIApp, rules: PageRules) -> None:
        self._app = app
        self._rules = rules

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app and adds the CORS headers if the single Origin header names a permitted origin."""
        origins = values_of(b"origin", scope["headers"]) if scope["type"] == "http" else []
        if len(origins) != 1 or not self._rules.may_read(origins[0]):
            await self._app(scope, receive, send)
            return
        more = self._headers(origins[0], scope["method"], scope["headers"])

        async def send_with_headers(message: Message) -> None:
            """Adds the CORS headers to the response's headers."""
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), *more]}
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _headers(self, origin: str, method: str, sent: Headers) -> Sequence[tuple[bytes, bytes]]:
        """Returns the CORS headers of an answer; those of a preflight if an OPTIONS call asks for a method. `sent`: the
        call's headers."""
        is_for_all = ALL in self._rules.origins
        granted = b"*" if is_for_all else origin.encode("latin-1")
        found = [(b"access-control-allow-origin", granted)]
        if not is_for_all:
            found.append((b"vary", b"Origin"))
        if method != "OPTIONS" or not values_of(ASKED_METHOD, sent):
            return [*found, (b"access-control-expose-headers", ", ".join(EXPOSED).encode())]
        found += [(b"access-control-allow-methods", METHODS), (b"access-control-max-age", MAX_AGE_S)]
        if asked := values_of(ASKED_HEADERS, sent):
            found.append((b"access-control-allow-headers", ", ".join(asked).encode("latin-1")))
        if values_of(ASKED_PRIVATE, sent):
            found.append((b"access-control-allow-private-network", b"true"))
        return found
