"""Client for a batch's calls, which take the same path as HTTP requests, without a connection."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.services.frontend.access.access import Caller
from quire.services.frontend.http.headers import CALL, REQUEST_ID_BYTES, TENANT

CALLER = "quire.batch_caller"  # key of the Caller in a scope


@dataclass(frozen=True, slots=True)
class InternalReply:
    """Reply to an internal call; `body` is text where it is not JSON."""

    status: int
    request_id: str
    retry_after_s: float
    body: Any


class CallerFromScope:
    """Middleware in place of the key check: the batch's creator has shown a key."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CALL].caller = scope[CALLER]
        await self._app(scope, receive, send)


class InternalClient:
    """Client of a server's own app."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def post(
        self, path: str, body: dict[str, Any], request_id: str, caller: Caller | None, tenant: str
    ) -> InternalReply:
        """Sends a JSON body through the ASGI application as POST `path`, with the caller's identity instead of a
        key, and returns the complete reply. HTTP errors are replies as well and are not raised."""
        content = json.dumps(body).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            (REQUEST_ID_BYTES, request_id.encode()),
            (TENANT.encode(), tenant.encode("latin-1", "replace")),
        ]
        unread = [content]
        sent: list[Message] = []

        async def receive() -> Message:
            """Returns the body as one message and then blocks, since the client of this call never disconnects."""
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await asyncio.Event().wait()  # the client never disconnects
            raise AssertionError

        async def send(message: Message) -> None:
            sent.append(message)

        await self._app(_scope(path, headers, caller), receive, send)
        return _reply(sent)


def _scope(path: str, headers: list[tuple[bytes, bytes]], caller: Caller | None) -> Scope:
    """Builds the ASGI scope of a POST; the authenticated caller is passed in it, so that no key is checked."""
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": headers,
        "client": ("batch", 0),
        "server": ("batch", 0),
        CALLER: caller,
    }


def _reply(sent: list[Message]) -> InternalReply:
    """Joins the sent ASGI messages to a reply. A body that is not JSON stays text; a missing retry-after is 1
    second."""
    start, *parts = sent
    headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in start["headers"]}
    text = b"".join(part.get("body", b"") for part in parts)
    try:
        body = json.loads(text)
    except ValueError:
        body = text.decode(errors="replace")
    return InternalReply(start["status"], headers.get("x-request-id", ""), float(headers.get("retry-after", 1)), body)
