"""Decodes bodies with a Content-Encoding while they are read: the first bytes on the event loop, the rest in a
thread."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from quire.services.frontend.bounds.bodies.content_coding import FIELD, ContentDecoder, encodings_of
from quire.services.frontend.http.headers import DECODED, values_of
from quire.services.frontend.http.middleware.guards import drain_body
from quire.shared.errors import QuireError, ResourceExhausted
from quire.shared.process.priority import lower_priority

FIELD_BYTES = FIELD.encode()
ENCODED_HEADERS = (FIELD_BYTES, b"content-length")  # they describe the encoded body
MAX_HELD = 1 << 28  # bytes
RETRY_MS = 1000
SMALL_SENT, SMALL_DECODED = 4096, 1 << 16  # bytes; decoded in a fraction of a millisecond


class DecodedBytes:
    """Decoded bytes that one call holds in memory; released when its `with` is left, or earlier."""

    def __init__(self, decoders: BodyDecoders) -> None:
        self._decoders = decoders
        self.num_bytes = 0

    def count(self, num_bytes: int) -> None:
        """Counts more bytes. Raises ResourceExhausted."""
        self._decoders.check_available(self, num_bytes)
        self._add(num_bytes)

    def release(self) -> None:
        """Releases all bytes, once the body has been read."""
        self._add(-self.num_bytes)

    def _add(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self._decoders.num_held += num_bytes

    def __enter__(self) -> DecodedBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BodyDecoders:
    """Owns the decoding thread, which decodes one piece at a time, and limits the decoded bytes of all calls: a few
    encoded bytes of many calls could otherwise fill the memory."""

    def __init__(self, max_held: int = MAX_HELD) -> None:
        """Starts the thread lazily, at a lower priority than the event loop. `max_held`: limit in bytes over all
        calls."""
        self._thread = ThreadPoolExecutor(1, "decode-bodies", lower_priority)
        self._max_held = max_held
        self.num_held = 0

    def held(self) -> DecodedBytes:
        """Returns a counter for a `with` around a call whose body is decoded."""
        return DecodedBytes(self)

    def check_available(self, held: DecodedBytes, num_bytes: int) -> None:
        """Raises ResourceExhausted if `held` cannot take more next to other calls; a single body always fits."""
        others = self.num_held - held.num_bytes
        if others and self.num_held + num_bytes > self._max_held:
            text = (
                f"bodies that are being decoded hold {self.num_held} of {self._max_held} bytes: retry later, or send "
                f"the body without {FIELD}"
            )
            raise ResourceExhausted(text, field=FIELD, retry_after_ms=RETRY_MS)

    def decoded(self, receive: Receive, encodings: Sequence[str], max_bytes: int, held: DecodedBytes | None) -> Receive:
        """Returns a receive callable for the decoded body of at most `max_bytes`. It raises InvalidArgument,
        BodyTooLarge and, if `held` is given, ResourceExhausted."""
        return _DecodedBody(receive, ContentDecoder(encodings, max_bytes), self._thread, held)

    async def decode(self, data: bytes, encodings: Sequence[str], max_bytes: int, held: DecodedBytes) -> bytes:
        """Returns a decoded message; its bytes are counted in `held`. Raises InvalidArgument, BodyTooLarge,
        ResourceExhausted."""
        decoder, pieces = ContentDecoder(encodings, max_bytes), []
        decoded_pieces = decoder.decode(data)
        loop = asyncio.get_running_loop()
        while (piece := await loop.run_in_executor(self._thread, next, decoded_pieces, None)) is not None:
            held.count(len(piece))
            pieces.append(piece)
        decoder.end()
        return b"".join(pieces)

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


class _DecodedBody:
    """The receive callable of an encoded body: returns decoded pieces, limited in size."""

    def __init__(
        self, receive: Receive, decoder: ContentDecoder, thread: ThreadPoolExecutor, held: DecodedBytes | None
    ) -> None:
        self._receive = receive
        self._held = held
        self._decoder = decoder
        self._thread = thread
        self._pieces: Iterator[bytes] = iter(())
        self._is_small = True
        self._is_last = False
        self._is_over = False

    async def __call__(self) -> Message:
        """Returns the next message of the decoded body. After a QuireError the rest of the body is drained before it is
        raised, so that the client reads the answer."""
        try:
            return await self._read()
        except QuireError:
            self._is_over = True
            if not self._is_last:
                await drain_body(self._receive)
            raise

    async def _read(self) -> Message:
        """Returns the next decoded piece, or the end of the body. A disconnect and all later messages pass as they
        are."""
        while not self._is_over:
            piece = await self._next()
            if piece is not None:
                if self._held is not None:
                    self._held.count(len(piece))
                return {"type": "http.request", "body": piece, "more_body": True}
            if self._is_last:
                self._is_over = True
                self._decoder.end()
                return {"type": "http.request", "body": b"", "more_body": False}
            message = await self._receive()
            if message["type"] != "http.request":
                self._is_over = True
                return message
            self._start_decoding(message)
        return await self._receive()

    def _start_decoding(self, message: Message) -> None:
        """Starts decoding one received message; the pieces are produced when _next() asks for them."""
        sent = message.get("body", b"")
        self._is_small = len(sent) <= SMALL_SENT
        self._is_last = not message.get("more_body", False)
        self._pieces = self._decoder.decode(sent)

    async def _next(self) -> bytes | None:
        """Returns the next decoded piece or None; small bodies are decoded here, others in the decoding thread."""
        if self._is_small and self._decoder.num_bytes < SMALL_DECODED:
            return next(self._pieces, None)
        return await asyncio.get_running_loop().run_in_executor(self._thread, next, self._pieces, None)


class DecodedBodies:
    """Replaces encoded bodies by decoded ones and removes the headers of the encoded body."""

    def __init__(
        self, app: ASGIApp, decoders: BodyDecoders, max_bytes: int, of_paths: Mapping[str, int] | None = None
    ) -> None:
        """Wraps `app`. `max_bytes`: limit on a decoded body; `of_paths`: other limits, for paths whose bodies are
        written to disk."""
        self._app = app
        self._decoders = decoders
        self._max_bytes = max_bytes
        self._of_paths = of_paths or {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Calls the app with the decoded body if the call has a Content-Encoding; its bytes are counted until the call
        ends."""
        if scope["type"] != "http" or not (named := values_of(FIELD_BYTES, scope["headers"])):
            await self._app(scope, receive, send)
            return
        with self._decoders.held() as held:
            receive = self._decoded(scope, receive, named, held)
            scope["headers"] = [pair for pair in scope["headers"] if pair[0] not in ENCODED_HEADERS]
            scope[DECODED] = held
            await self._app(scope, receive, send)

    def _decoded(self, scope: Scope, receive: Receive, named: Sequence[str], held: DecodedBytes) -> Receive:
        """Returns the receive callable of the body. One with an unsupported encoding raises when it is read; the bytes
        of a path with its own limit, written to disk, are not counted in `held`."""
        try:
            encodings = encodings_of(named)
        except QuireError as error:
            return _failing_receive(error)
        if not encodings:
            return receive
        is_kept_on_disk = scope["path"] in self._of_paths
        max_bytes = self._of_paths.get(scope["path"], self._max_bytes)
        return self._decoders.decoded(receive, encodings, max_bytes, None if is_kept_on_disk else held)


def _failing_receive(error: QuireError) -> Receive:
    """Returns a receive callable that raises the error, for a body with an unsupported encoding."""

    async def refuse() -> Message:
        raise error

    return refuse
