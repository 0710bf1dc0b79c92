"""Runs a generation for an HTTP client and sends the answer, in one piece or as a stream."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from itertools import chain
from typing import Any, Protocol

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.generation.generator import Generator
from quire.services.frontend.http.dialect import EVENTS
from quire.services.frontend.http.dialects import Dialects
from quire.services.frontend.http.disconnect import while_connected
from quire.services.frontend.http.headers import CALL, DIALECTS, KEEPALIVE
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.request import Request
from quire.shared.errors import Internal, QuireError
from quire.shared.logs import logger
from quire.shared.process.supervision import Tasks

log = logger("http")


CANDIDATES_AT_ONCE = 4_096  # log-probabilities serialized in a few milliseconds
OPEN_AFTER_S = 0.8  # delay before a stream without tokens sends its headers: within a second

_long_answers = ThreadPoolExecutor(1, "long-answers")  # one at a time: serializing takes 100 times the answer's size
_keepalives = Tasks()  # each is cancelled by its response


def keep_alive_comment() -> bytes:
    """Returns a server-sent event without content."""
    return b": keep-alive\n\n"


class ResponseFormatter(Protocol):
    """Formats the answer of one call, streamed or whole, in a dialect's form."""

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        """Returns the stream events for these deltas."""

    def last_events(self, generation: Generation) -> bytes:
        """Returns the events that end a stream."""

    def error_events(self, error: QuireError) -> bytes:
        """Returns the events that end a failed stream."""

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """Returns the answer in one piece. `deltas`: one per sample, in order."""

    def refusal(self, error: QuireError) -> Response:
        """Returns the response for a call that failed before its answer began."""


class ErrorWriter(Protocol):
    """Formats errors for the clients of one path, before or within a stream."""

    def error_events(self, error: QuireError) -> bytes:
        """Returns the events that end a failed stream."""

    def refusal(self, error: QuireError) -> Response:
        """Returns the response for a call that failed before its answer began."""


class DeferredResponse(Response, ABC):
    """A response whose content is produced while it is sent, so that one place handles disconnects and errors.

    Headers wait for the first tokens, in a stream for a short time only: until they are sent, a failure still gets its
    own status.
    """

    def __init__(
        self,
        kind: str,
        error_writer: ErrorWriter,
        structured_output_field: str = "",
        keep_alive: Callable[[], bytes] | None = None,
    ) -> None:
        """Prepares the response. `kind`: media type; `structured_output_field`: of the request; `keep_alive`: returns
        what a silent stream sends."""
        super().__init__(media_type=kind, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._error_writer = error_writer
        self._structured_output_field = structured_output_field
        self._keep_alive = keep_alive
        self._is_open = False
        self._num_sent = 0  # stream pieces sent
        self._send_lock = asyncio.Lock()

    @abstractmethod
    async def respond(self, call: Call, send: Send) -> None:
        """Sends the whole response. Raises the error that the client gets instead."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the response until the client disconnects. An error is noted in the call and sent in the client's
        terms; an unexpected exception is logged and sent as an internal error."""
        call: Call = scope[CALL]
        async with while_connected(receive):
            try:
                async with self._kept_alive(scope.get(KEEPALIVE, 0.0), send):
                    await self.respond(call, send)
            except Exception as error:
                if isinstance(error, QuireError):
                    dialects: Dialects = scope[DIALECTS]
                    call.error, reported = (
                        error,
                        dialects.in_client_terms(scope["path"], error, self._structured_output_field),
                    )
                else:
                    log.exception("call failed", request=call.id)
                    call.error, reported = Internal(type(error).__name__), Internal("internal error")
                await self._end(reported, scope, receive, send)

    async def _end(self, error: QuireError, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the error: as events if the stream has begun, else as a response of its own."""
        if self._is_open:
            await send({"type": "http.response.body", "body": self._error_writer.error_events(error)})
            return
        await self._error_writer.refusal(error)(scope, receive, send)

    @asynccontextmanager
    async def _kept_alive(self, every_s: float, send: Send) -> AsyncIterator[None]:
        """Sends the headers of a silent stream after a while, then keep-alives, within the `with`."""
        if self._keep_alive is None:
            yield
            return
        task = _keepalives.start("keep-alive", self._send_keep_alives(self._keep_alive, every_s, send))
        try:
            yield
        finally:
            task.cancel()

    async def _send_keep_alives(self, keep_alive: Callable[[], bytes], every_s: float, send: Send) -> None:
        """Sends the headers after OPEN_AFTER_S, then a keep-alive after every `every_s` of silence. Runs concurrently
        with respond(); errors end only this task, since respond() notices a disconnect itself."""
        try:
            await asyncio.sleep(OPEN_AFTER_S)
            await self._send_piece(b"", send)
            while every_s:
                num_sent = self._num_sent
                await asyncio.sleep(every_s)
                if self._num_sent == num_sent:
                    await self._send_piece(keep_alive(), send)
        except Exception:
            log.exception("cannot send keep-alives")

    async def _send_piece(self, piece: bytes, send: Send) -> None:
        """Sends a piece of a stream, preceded by the headers if needed."""
        async with self._send_lock:
            if not self._is_open:
                await self._open(send)
            if piece:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _open(self, send: Send) -> None:
        """Sends the headers. `_is_open` is set first, so that no concurrent task sends them too, and reset on
        failure."""
        self._is_open = True
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        except Exception:
            self._is_open = False
            raise


async def _serialize(deltas: Sequence[SampleDelta], write: Callable[[], bytes]) -> bytes:
    """Returns the serialized deltas; in a thread if they hold so many candidates that the loop would be blocked."""
    entries = chain.from_iterable(chain(delta.prompt_logprobs, delta.logprobs) for delta in deltas)
    if sum(len(entry.top) for entry in entries) > CANDIDATES_AT_ONCE:
        return await asyncio.get_running_loop().run_in_executor(_long_answers, write)
    return write()


class GenerationResponse(DeferredResponse):
    """The answer of a generation that ends with its call."""

    def __init__(
        self,
        generator: Generator,
        request: Request,
        format: ResponseFormatter,
        *,
        stream: bool,
        stream_type: str = EVENTS,
        keep_alive: Callable[[], bytes] = keep_alive_comment,
    ) -> None:
        """Prepares the response. `stream`: send events of media type `stream_type` instead of one JSON object;
        `keep_alive`: returns what a silent stream sends."""
        kind = stream_type if stream else "application/json"
        super().__init__(kind, format, request.structured_output_field, keep_alive if stream else None)
        self._generator = generator
        self._request = request
        self._format = format
        self._streams = stream

    async def respond(self, call: Call, send: Send) -> None:
        """Runs the generation within the call and sends its output, as a stream or in one piece."""
        async with self._generator.start(self._request, call) as generation:
            await (self._stream(generation, send) if self._streams else self._whole(generation, send))

    async def _whole(self, generation: Generation, send: Send) -> None:
        """Sends the answer in one piece, when all samples have ended."""
        body = await self._body(generation)
        self.headers["content-length"] = str(len(body))
        await self._open(send)
        await send({"type": "http.response.body", "body": body})

    async def _body(self, generation: Generation) -> bytes:
        """Returns the whole answer as JSON, when all samples have ended."""
        deltas = await generation.collect()
        return await _serialize(deltas, lambda: orjson.dumps(self._format.whole(deltas, generation)))

    async def _stream(self, generation: Generation, send: Send) -> None:
        """Sends one piece for all deltas that are ready; further deltas collect while it is being sent."""
        async for deltas in generation:
            piece = await _serialize(deltas, partial(self._format.events, deltas, generation))
            await self._send_piece(piece, send)
        last = self._format.last_events(generation)
        async with self._send_lock:
            self._keep_alive = None
            if not self._is_open:
                await self._open(send)
            await send({"type": "http.response.body", "body": last})
