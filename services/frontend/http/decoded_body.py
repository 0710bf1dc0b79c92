"""Bodies with a Content-Encoding, decoded as they are read: their first bytes on the loop, the rest in a thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.frontend.bounds.content_coding import FIELD, ContentDecoder, encodings_of
from services.frontend.http.headers import values_of
from shared.errors import QuireError

FIELD_BYTES = FIELD.encode()
OF_THE_SENT = (FIELD_BYTES, b"content-length")  # headers that say nothing of the decoded body
SMALL_SENT, SMALL_DECODED = 4096, 1 << 16  # bytes; decoded in a fraction of a millisecond


class BodyDecoders:
    """Owns the thread in which large bodies are decoded, one piece after the other."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "decode-bodies")

    def decoded(self, receive: Receive, encodings: Sequence[str], max_bytes: int) -> Receive:
        """Receives the same body decoded, within `max_bytes`; raises InvalidArgument, BodyTooLarge."""
        return _DecodedBody(receive, ContentDecoder(encodings, max_bytes), self._thread)

    async def whole(self, data: bytes, encodings: Sequence[str], max_bytes: int) -> bytes:
        """Returns a message decoded. Raises InvalidArgument, BodyTooLarge."""
        decoder = ContentDecoder(encodings, max_bytes)

        def decode() -> bytes:
            whole = b"".join(decoder.decode(data))
            decoder.end()
            return whole

        return await asyncio.get_running_loop().run_in_executor(self._thread, decode)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class _DecodedBody:
    """The receive of a body that is encoded."""

    def __init__(self, receive: Receive, decoder: ContentDecoder, thread: ThreadPoolExecutor) -> None:
        self._receive = receive
        self._decoder = decoder
        self._thread = thread
        self._pieces: Iterator[bytes] = iter(())
        self._is_small = True
        self._is_last = False
        self._is_over = False

    async def __call__(self) -> Message:
        while not self._is_over:
            piece = await self._next()
            if piece is not None:
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_last:
                self._is_over = True
                self._decoder.end()
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                self._is_over = True
                return message
            self._take(message)
        return await self._receive()

    def _take(self, message: Message) -> None:
        sent = message.get("body", b"")
        self._is_small = len(sent) <= SMALL_SENT
        self._is_last = not message.get("more_body", False)
        self._pieces = self._decoder.decode(sent)

    async def _next(self) -> bytes | None:
        if self._is_small and self._decoder.num_bytes < SMALL_DECODED:
            return next(self._pieces, None)
        return await asyncio.get_running_loop().run_in_executor(self._thread, next, self._pieces, None)


class DecodedBodies:
    """Gives the calls of `app` their bodies decoded, and no header that says otherwise."""

    def __init__(
        self, app: ASGIApp, decoders: BodyDecoders, max_bytes: int, of_paths: Mapping[str, int] | None = None
    ) -> None:
        """`max_bytes`: of a decoded body; `of_paths`: with another limit."""
        self._app = app
        self._decoders = decoders
        self._max_bytes = max_bytes
        self._of_paths = of_paths or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (named := values_of(FIELD_BYTES, scope["headers"])):
            receive = self._decoded(scope, receive, named)
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in OF_THE_SENT]
        await self._app(scope, receive, send)

    def _decoded(self, scope: Scope, receive: Receive, named: Sequence[str]) -> Receive:
        try:
            encodings = encodings_of(named)
        except QuireError as error:
            return _refusing(error)
        if not encodings:
            return receive
        max_bytes = self._of_paths.get(scope["path"], self._max_bytes)
        return self._decoders.decoded(receive, encodings, max_bytes)


def _refusing(error: QuireError) -> Receive:
    """The receive of a body that cannot be read."""

    async def refuse() -> Message:
        raise error

    return refuse
