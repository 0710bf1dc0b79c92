"""uvicorn's protocol with a door in front: while there is no room, calls for work are answered from their headers.

A call that is refused here costs no task, no scope and no second turn of the event loop, and one that has come in one
piece no parser.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar, NamedTuple, cast

import httptools
from starlette.responses import Response
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from quire.services.frontend.http.headers import REQUEST_ID_BYTES, Headers
from quire.services.frontend.http.server import complete_request
from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter, DeadlineTimer
from quire.services.frontend.http.server.half_closed import HalfClosedTransport
from quire.services.frontend.http.server.upgrades import CONNECT, without_upgrade

Refuse = Callable[[bytes, bytes, Headers], bytes | None]  # method, target, headers -> a whole answer, None to let it in


class AdmissionHooks(NamedTuple):
    """Where calls come in."""

    refuse: Refuse
    is_full: Callable[[], bool]  # whether `refuse` would refuse work


class _Refused:
    """In the place of a cycle whose answer is complete: what else comes of its request is dropped."""

    response_complete = True
    response_started = True
    message_event = asyncio.Event()


def _last_words(status: HTTPStatus, more: str = "") -> bytes:
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n"
    return f"{head}{more}\r\n".encode()


TOO_MANY = _last_words(HTTPStatus.SERVICE_UNAVAILABLE, "retry-after: 1\r\n")
TOO_SLOW = _last_words(HTTPStatus.REQUEST_TIMEOUT)
NO_TUNNELS = _last_words(HTTPStatus.NOT_IMPLEMENTED)  # CONNECT
CUT_SHORT = _last_words(HTTPStatus.BAD_REQUEST)  # the client closed its half within a request
MANY_CHUNKS = _last_words(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
LARGE_HEADERS = _last_words(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
REFUSED = cast(RequestResponseCycle, _Refused())
MAX_CHUNKS = 65_536  # of a body: each costs microseconds, however little is in it
LINGER_S = 1.0  # that a peer has to hear the last words and to close


class AdmittingHttpProtocol(HttpToolsProtocol):
    """One connection. Who is too slow, or one connection too many, is closed."""

    refuse: ClassVar[Refuse]
    is_full: ClassVar[Callable[[], bool]]
    connection_limiter: ClassVar[ConnectionLimiter]

    parser: httptools.HttpRequestParser
    cycle: RequestResponseCycle | None
    timeout_keep_alive_task: asyncio.TimerHandle | None
    _is_kept = False
    _is_lingering = False
    _is_over = False  # what still comes is dropped
    _in_headers = False
    _in_call = False  # from its first byte to the last of its body
    _header_bytes = 0
    _num_chunks = 0  # of all bodies that were read, their last ones, which are empty, included
    _chunks_before = 0  # those of the body that is read
    _is_behind_size = False  # of a chunk of which nothing has come: what comes without end is trailers
    _trailer_bytes = 0
    _half_closed: HalfClosedTransport | None = None
    _answering: RequestResponseCycle | None = None  # `cycle` is the last of a pipeline

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(transport)
        self._reading, self._writing = DeadlineTimer(self.loop), DeadlineTimer(self.loop)
        self._address = self.client[0] if self.client else ""
        self._is_kept = self.connection_limiter.acquire(self._address)
        if self._is_kept:
            self._reading.set(self.connection_limiter.limits.header_s, self._no_headers)
        else:
            self._is_lingering = self.connection_limiter.acquire_linger()
            self._turn_away(TOO_MANY, lingers=self._is_lingering)

    def connection_lost(self, exc: Exception | None) -> None:
        self._reading.close()
        self._writing.close()
        if self._half_closed is not None:
            self._half_closed.stop()
        if self._is_kept:
            self._is_kept = False
            self.connection_limiter.release(self._address)
        if self._is_lingering:
            self._is_lingering = False
            self.connection_limiter.release_linger()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self._is_kept or self._is_over or self.transport.is_closing():
            return
        if self._in_headers:
            self._header_bytes += len(data)
        elif not self._in_call and type(self).is_full() and self._refuse_whole(data):
            return
        self._unset_keepalive_if_required()
        num_chunks = self._num_chunks
        self._parse(data)
        if self._is_behind_size and num_chunks == self._num_chunks:
            self._trailer_bytes += len(data)
        limit = self.connection_limiter.limits.header_bytes
        if self._in_headers and max(self._header_bytes, len(data)) > limit:
            self._give_up("headers", LARGE_HEADERS)
        elif self._trailer_bytes > limit:
            self._give_up("headers", self._unless_answered(LARGE_HEADERS))

    def _parse(self, data: bytes) -> None:
        """Calls the `on_...` of what it finds."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as paused:
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if method == CONNECT:
                    self._turn_away(NO_TUNNELS)
                    return
                data = without_upgrade(method, self.url, version, self.headers) + data[paused.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as every parser of uvicorn
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def eof_received(self) -> bool:
        """Nothing more comes. Returns whether an answer is still to be written; TLS cannot be closed by halves."""
        if not self._is_kept or self._is_over or self.scheme == "https":
            return False
        cycle = self.cycle
        is_answered = cycle is None or cycle.response_complete
        if self._in_call:
            if is_answered if self._in_headers else cycle is not None and not cycle.response_started:
                self.transport.write(CUT_SHORT)
            return False
        if cycle is None or is_answered:
            return False
        if self.pipeline:  # what is written next belongs to an answer before this one
            cycle.keep_alive = False
            return True
        self._half_closed = HalfClosedTransport(self.transport, cycle)
        cycle.transport = cast(asyncio.Transport, self._half_closed)
        return True

    def _refuse_whole(self, data: bytes) -> bool:
        """Whether `data` was a call and has been answered. Nothing of one that came before it is under way."""
        if self.cycle is not None and not self.cycle.response_complete:
            return False
        call = complete_request.read(data, self.connection_limiter.limits.header_bytes)
        if call is None:
            return False
        headers = ((REQUEST_ID_BYTES, call.request_id),) if call.request_id else ()
        answer = type(self).refuse(b"POST", call.target, headers)
        if answer is None:
            return False
        self._unset_keepalive_if_required()
        self.transport.write(answer)
        self._reading.set(self.connection_limiter.limits.idle_s, self.transport.close)
        return True

    def send_400_response(self, msg: str) -> None:
        if not self._is_over:
            super().send_400_response(msg)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._in_call, self._header_bytes = True, True, 0
        self._chunks_before, self._is_behind_size, self._trailer_bytes = self._num_chunks, False, 0
        self._reading.set(self.connection_limiter.limits.header_s, self._no_headers)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Leaves trailers out, which come behind a body in chunks: nobody reads them, and the headers, which the call
        has already, must not grow by them (RFC 9110 6.5.1)."""
        if self._in_headers:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        self._num_chunks += 1
        self._is_behind_size = True
        if self._num_chunks - self._chunks_before > MAX_CHUNKS and not self._is_over:
            self._give_up("body", self._unless_answered(MANY_CHUNKS))

    def on_body(self, body: bytes) -> None:
        self._is_behind_size = False
        super().on_body(body)

    def on_headers_complete(self) -> None:
        if self.parser.should_upgrade():  # comes once more, without
            return
        self._in_headers = False
        self._reading.set(self.connection_limiter.limits.body_s, self._no_body)
        self._pass_door()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._writing.set(self.connection_limiter.limits.write_s, self._not_read)

    def resume_writing(self) -> None:
        self._writing.clear()
        super().resume_writing()

    def _no_headers(self) -> None:
        if self.flow.read_paused:  # it is we who do not read
            self._reading.set(self.connection_limiter.limits.header_s, self._no_headers)
        else:
            self._give_up("headers", TOO_SLOW if self._in_headers else b"")

    def _no_body(self) -> None:
        if self.flow.read_paused:
            self._reading.set(self.connection_limiter.limits.body_s, self._no_body)
        else:
            self._give_up("body", self._unless_answered(TOO_SLOW))

    def _unless_answered(self, words: bytes) -> bytes:
        return b"" if self.cycle is None or self.cycle.response_started else words

    def _not_read(self) -> None:
        self.connection_limiter.count_closed("write")
        self.transport.abort()

    def _give_up(self, reason: str, answer: bytes) -> None:
        self.connection_limiter.count_closed(reason)
        self._turn_away(answer)

    def _turn_away(self, answer: bytes, *, lingers: bool = True) -> None:
        """With an answer not at once: closed with something of the peer's unread, the connection would be reset, and
        the answer lost."""
        self._reading.clear()
        if answer:
            self.transport.write(answer)
        if not (answer and lingers and self.transport.can_write_eof()):
            self.transport.close()
            return
        self._is_over = True
        for cycle in (self._answering, self.cycle, *(waiting for waiting, _ in self.pipeline)):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        self.transport.write_eof()
        self._reading.set(LINGER_S, self.transport.close)

    def _pass_door(self) -> None:
        is_free = self.cycle is None or self.cycle.response_complete
        answer = type(self).refuse(self.parser.get_method(), self.url, self.headers) if is_free else None
        if answer is None:
            super().on_headers_complete()
            if is_free:
                self._answering = self.cycle
            return
        self.cycle = REFUSED
        if self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive():
            self._turn_away(answer)
        else:
            self.transport.write(answer)
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Goes on with the next call of a pipeline."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._answering = following

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        if not self._is_over:
            self._reading.clear()
        self._in_call = self._is_behind_size = False
        super().on_message_complete()
        if self.cycle is REFUSED and self.timeout_keep_alive_task is None and not self.transport.is_closing():
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )


def protocol_class(admission_hooks: AdmissionHooks, connections: ConnectionLimiter) -> type[AdmittingHttpProtocol]:
    """The protocol for a server with this admission_hooks."""
    refuse, is_full = staticmethod(admission_hooks.refuse), staticmethod(admission_hooks.is_full)
    return type(
        "BoundHttpProtocol",
        (AdmittingHttpProtocol,),
        {"refuse": refuse, "is_full": is_full, "connection_limiter": connections},
    )


@dataclass(frozen=True, slots=True)
class SerializedResponse:
    """An answer as it is written, with room for headers that differ from call to call."""

    status: int
    head: bytes
    body: bytes

    @classmethod
    def from_response(cls, response: Response) -> SerializedResponse:
        status = HTTPStatus(response.status_code)
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        head += [name + b": " + value for name, value in response.raw_headers]
        return cls(status.value, b"\r\n".join(head), bytes(response.body))

    def with_headers(self, headers: Headers) -> bytes:
        more = b"".join([b"\r\n" + name + b": " + value for name, value in headers])
        return b"".join((self.head, more, b"\r\n\r\n", self.body))
