"""Around every HTTP call: the size of its body and the API key. Plain ASGI: they see every chunk there is."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
from collections.abc import Callable

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

WORTH_AN_ANSWER = 4  # times the limit: a client that sends more than that may find its connection closed instead
LONGEST_PASSING_S = 1.0


class BodyLimit:
    """Bodies of more than `max_bytes` are 413; nothing of those whose length is announced is kept."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        announced = int(headers.get(b"content-length", b"0"))
        waits = b"expect" in headers  # for leave to send the body
        num_bytes = 0

        async def limited() -> Message:
            nonlocal num_bytes
            if self._max_bytes < announced <= WORTH_AN_ANSWER * self._max_bytes and not waits:
                await _let_pass(receive)
            self._check(announced)
            message = await receive()
            num_bytes += len(message.get("body", b""))
            self._check(num_bytes)
            return message

        await self._app(scope, limited, send)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(413, f"the body has more than {self._max_bytes} bytes")


async def _let_pass(receive: Receive) -> None:
    """What a client still writes when its connection is closed makes it lose the answer."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(LONGEST_PASSING_S):
            while (await receive()).get("more_body"):
                pass


class ApiKey:
    """Calls under /v1 show `Authorization: Bearer <key>`, or `x-api-key: <key>` as Anthropic's clients do."""

    def __init__(self, app: ASGIApp, key: str, refusal: Callable[[str], Response]) -> None:
        """`refusal`: the answer for a path."""
        self._app = app
        self._key = key.encode()
        self._refusal = refusal

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith("/v1") and not self._is_shown(scope):
            await self._refusal(scope["path"])(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_shown(self, scope: Scope) -> bool:
        headers = dict(scope["headers"])
        bearer = hmac.compare_digest(headers.get(b"authorization", b""), b"Bearer " + self._key)
        return hmac.compare_digest(headers.get(b"x-api-key", b""), self._key) or bearer
