"""Runs a generation for an HTTP client and writes the answer, in one piece or as a stream."""

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


CANDIDATES_AT_ONCE = 4_096  # log-probabilities that are written in some milliseconds
OPEN_AFTER_S = 0.8  # a stream without a token: its status line comes within a second

_long_answers = ThreadPoolExecutor(1, "long-answers")  # one at a time: each takes a hundred times its bytes meanwhile
_keepalives = Tasks()  # each is ended by the answer that it keeps alive


def keep_alive_comment() -> bytes:
    """Returns an event that says nothing, as server-sent events spell it."""
    return b": keep-alive\n\n"


class ResponseFormatter(Protocol):
    """How one call is answered."""

    def events(self, deltas: list[SampleDelta], generation: Generation) -> bytes:
        """What a stream says about these."""

    def last_events(self, generation: Generation) -> bytes:
        """The end of a stream."""

    def error_events(self, error: QuireError) -> bytes:
        """The end of a stream that breaks off."""

    def whole(self, deltas: list[SampleDelta], generation: Generation) -> dict[str, Any]:
        """The answer in one piece: a delta per sample, in order."""

    def refusal(self, error: QuireError) -> Response:
        """Instead of an answer."""


class ErrorWriter(Protocol):
    """How the clients of one path read errors."""

    def error_events(self, error: QuireError) -> bytes:
        """The end of a stream that breaks off."""

    def refusal(self, error: QuireError) -> Response:
        """Instead of an answer."""


class DeferredResponse(Response, ABC):
    """The work happens while the response is sent, so that one place sees the client go and every error.

    Headers wait for the first tokens, of a stream for a moment: until then a failure still gets its own status.
    """

    def __init__(
        self,
        kind: str,
        words: ErrorWriter,
        structured_output_field: str = "",
        keep_alive: Callable[[], bytes] | None = None,
    ) -> None:
        """`kind`: of its media; `structured_output_field`: the request's;
        `keep_alive`: what a stream sends while it is silent."""
        super().__init__(media_type=kind, headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._words = words
        self._structured_output_field = structured_output_field
        self._keep_alive = keep_alive
        self._is_open = False
        self._num_sent = 0  # pieces of a stream
        self._turn = asyncio.Lock()  # to send

    @abstractmethod
    async def respond(self, call: Call, send: Send) -> None:
        """Sends everything; raises what its client should hear instead."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call: Call = scope[CALL]
        async with while_connected(receive):
            try:
                async with self._kept_alive(scope.get(KEEPALIVE, 0.0), send):
                    await self.respond(call, send)
            except Exception as error:
                if isinstance(error, QuireError):
                    dialects: Dialects = scope[DIALECTS]
                    call.error, told = (
                        error,
                        dialects.in_client_terms(scope["path"], error, self._structured_output_field),
                    )
                else:
                    log.exception("a call failed", request=call.id)
                    call.error, told = Internal(type(error).__name__), Internal("internal error")
                await self._end(told, scope, receive, send)

    async def _end(self, error: QuireError, scope: Scope, receive: Receive, send: Send) -> None:
        """A stream that has begun has to end with something that its reader understands."""
        if self._is_open:
            await send({"type": "http.response.body", "body": self._words.error_events(error)})
            return
        await self._words.refusal(error)(scope, receive, send)

    @asynccontextmanager
    async def _kept_alive(self, every_s: float, send: Send) -> AsyncIterator[None]:
        """Opens a stream that has nothing to say yet, and sends keep-alives in its silences."""
        if self._keep_alive is None:
            yield
            return
        task = _keepalives.start("keep-alive", self._break_silence(self._keep_alive, every_s, send))
        try:
            yield
        finally:
            task.cancel()

    async def _break_silence(self, keep_alive: Callable[[], bytes], every_s: float, send: Send) -> None:
        """Runs beside the answer, which goes on without it: a client that is gone is noticed there."""
        try:
            await asyncio.sleep(OPEN_AFTER_S)
            await self._send_piece(b"", send)
            while every_s:
                num_sent = self._num_sent
                await asyncio.sleep(every_s)
                if self._num_sent == num_sent:
                    await self._send_piece(keep_alive(), send)
        except Exception:
            log.exception("a stream is not kept alive")

    async def _send_piece(self, piece: bytes, send: Send) -> None:
        """A part of a stream, behind its headers."""
        async with self._turn:
            if not self._is_open:
                await self._open(send)
            if piece:
                self._num_sent += 1
                await send({"type": "http.response.body", "body": piece, "more_body": True})

    async def _open(self, send: Send) -> None:
        """Sends the headers. Marked before they are sent, so that nobody sends others meanwhile; if that fails, nothing
        has been begun, and whoever comes next may try."""
        self._is_open = True
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        except Exception:
            self._is_open = False
            raise


async def _aside(deltas: Sequence[SampleDelta], write: Callable[[], bytes]) -> bytes:
    """Returns what is written of these: in a thread, where they have so many candidates that the loop would be held."""
    entries = chain.from_iterable(chain(delta.prompt_logprobs, delta.logprobs) for delta in deltas)
    if sum(len(entry.top) for entry in entries) > CANDIDATES_AT_ONCE:
        return await asyncio.get_running_loop().run_in_executor(_long_answers, write)
    return write()


class GenerationResponse(DeferredResponse):
    """Of a generation that belongs to the call."""

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
        kind = stream_type if stream else "application/json"
        super().__init__(kind, format, request.structured_output_field, keep_alive if stream else None)
        self._generator = generator
        self._request = request
        self._format = format
        self._streams = stream

    async def respond(self, call: Call, send: Send) -> None:
        async with self._generator.start(self._request, call) as generation:
            await (self._stream(generation, send) if self._streams else self._whole(generation, send))

    async def _whole(self, generation: Generation, send: Send) -> None:
        body = await self._body(generation)
        self.headers["content-length"] = str(len(body))
        await self._open(send)
        await send({"type": "http.response.body", "body": body})

    async def _body(self, generation: Generation) -> bytes:
        deltas = await generation.collect()
        return await _aside(deltas, lambda: orjson.dumps(self._format.whole(deltas, generation)))

    async def _stream(self, generation: Generation, send: Send) -> None:
        """One write for everything that is ready; while it is under way, the next news gather."""
        async for deltas in generation:
            piece = await _aside(deltas, partial(self._format.events, deltas, generation))
            await self._send_piece(piece, send)
        last = self._format.last_events(generation)
        async with self._turn:
            self._keep_alive = None
            if not self._is_open:
                await self._open(send)
            await send({"type": "http.response.body", "body": last})
