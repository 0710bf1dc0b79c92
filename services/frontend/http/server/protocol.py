"""uvicorn's HTTP protocol with admission in front: while the frontend is full, inference calls are refused by their
headers.

A call refused here creates no task and no scope and takes one event loop iteration; one that arrived in a single piece
is not even parsed.
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
from quire.services.frontend.http.server.upgrades import CONNECT, head_of, wants_web_socket, without_upgrade

Refuse = Callable[
    [bytes, bytes, Headers], bytes | None
]  # (method, target, headers) -> the whole refusal, or None to accept


class AdmissionHooks(NamedTuple):
    """Callbacks that decide on admission before a call is created."""

    refuse: Refuse
    is_full: Callable[[], bool]  # whether `refuse` would refuse every inference call
    takes_web_socket: Callable[[bytes], bool] = lambda _target: False  # whether a target has WebSocket connections


class _Refused:
    """Replaces the request cycle of a refused call: the answer is complete, the rest of the request is dropped."""

    response_complete = True
    response_started = True
    message_event = asyncio.Event()


def _closing_response(status: HTTPStatus, more: str = "") -> bytes:
    """Returns an empty response that closes the connection. `more`: further header lines, each with its line end."""
    head = f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-length: 0\r\nconnection: close\r\n"
    return f"{head}{more}\r\n".encode()


TOO_MANY = _closing_response(HTTPStatus.SERVICE_UNAVAILABLE, "retry-after: 1\r\n")
TOO_SLOW = _closing_response(HTTPStatus.REQUEST_TIMEOUT)
NO_TUNNELS = _closing_response(HTTPStatus.NOT_IMPLEMENTED)  # CONNECT
CUT_SHORT = _closing_response(HTTPStatus.BAD_REQUEST)  # the client half-closed within a request
MANY_CHUNKS = _closing_response(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
LARGE_HEADERS = _closing_response(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
REFUSED = cast(RequestResponseCycle, _Refused())
MAX_CHUNKS = 65_536  # per body; each costs microseconds, however small
LINGER_S = 1.0  # time for the peer to read the last response and close


class AdmittingHttpProtocol(HttpToolsProtocol):
    """One connection, whose calls can be refused by their headers, without being created. It is closed if it is too
    slow, or exceeds the limit on connections."""

    refuse: ClassVar[Refuse]
    is_full: ClassVar[Callable[[], bool]]
    takes_web_socket: ClassVar[Callable[[bytes], bool]]
    connection_limiter: ClassVar[ConnectionLimiter]

    parser: httptools.HttpRequestParser
    cycle: RequestResponseCycle | None
    timeout_keep_alive_task: asyncio.TimerHandle | None
    _is_kept = False
    _is_lingering = False
    _is_over = False  # further input is dropped
    _in_headers = False
    _in_call = False  # between the first byte of a call and the last of its body
    _header_bytes = 0
    _num_chunks = 0  # of all bodies on this connection, including the empty last chunks
    _chunks_before = 0  # value of _num_chunks when the present body began
    _is_behind_size = False  # after a chunk size without data; endless input there is trailers
    _trailer_bytes = 0
    _half_closed: HalfClosedTransport | None = None
    _answering: RequestResponseCycle | None = None  # first unfinished call of a pipeline; `cycle` is its last

    def connection_made(self, transport: asyncio.Transport) -> None:
        """Counts the connection and starts the time limit for headers; beyond the limits, answers with a refusal and
        closes."""
        super().connection_made(transport)
        self._reading, self._writing = DeadlineTimer(self.loop), DeadlineTimer(self.loop)
        self._address = self.client[0] if self.client else ""
        self._is_kept = self.connection_limiter.acquire(self._address)
        if self._is_kept:
            self._reading.set(self.connection_limiter.limits.header_s, self._on_header_timeout)
        else:
            self._is_lingering = self.connection_limiter.acquire_linger()
            self._respond_and_close(TOO_MANY, lingers=self._is_lingering)

    def connection_lost(self, exc: Exception | None) -> None:
        """Stops the timers and releases the connection's place in the limits."""
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
        """Parses received bytes. Closes the connection for too large headers or trailers; a call that arrived whole
        while the frontend is full is refused without parsing."""
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
            self._close_with("headers", LARGE_HEADERS)
        elif self._trailer_bytes > limit:
            self._close_with("headers", self._if_unanswered(LARGE_HEADERS))

    def _parse(self, data: bytes) -> None:
        """Feeds the parser, which calls the `on_...` methods. An offer to upgrade is removed and parsed again; CONNECT
        and malformed data close the connection."""
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as paused:
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if method == CONNECT:
                    self._respond_and_close(NO_TUNNELS)
                    return
                if wants_web_socket(method, version, self.headers) and self._takes_web_socket():
                    self._become_web_socket(data[paused.args[0] :])
                    return
                data = without_upgrade(method, self.url, version, self.headers) + data[paused.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn configures its parsers
            except httptools.HttpParserError:
                self.send_400_response("Invalid HTTP request received.")
                return

    def _takes_web_socket(self) -> bool:
        """Returns whether the call that is read may become a WebSocket: its path has them, and no earlier call on this
        connection is unanswered."""
        is_first = self.cycle is None or self.cycle.response_complete
        return is_first and type(self).takes_web_socket(self.url)

    def _become_web_socket(self, data: bytes) -> None:
        """Hands the connection over to the protocol of WebSockets, with its place in the limits. `data`: bytes received
        after the headers."""
        from quire.services.frontend.http.server.web_sockets import WebSocketConnection

        address, self._is_kept, self._is_over = self._address, False, True
        self._reading.close()
        self._writing.close()
        self._unset_keepalive_if_required()
        self.connections.discard(self)
        taken = WebSocketConnection(
            self.connection_limiter,
            lambda: self.connection_limiter.release(address),
            config=self.config,
            server_state=self.server_state,
            app_state=self.app_state,
        )
        taken.connection_made(self.transport)
        self.transport.set_protocol(taken)
        taken.data_received(head_of(self.url, self.headers) + data)

    def eof_received(self) -> bool:
        """Handles a half-close: answers a call that was cut short, and keeps the connection for an answer that is still
        due, probing whether the client reads it. Returns whether to keep it open; TLS cannot be half-closed."""
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
        if self.pipeline:  # the next bytes written belong to an earlier answer
            cycle.keep_alive = False
            return True
        self._half_closed = HalfClosedTransport(self.transport, cycle)
        cycle.transport = cast(asyncio.Transport, self._half_closed)
        return True

    def _refuse_whole(self, data: bytes) -> bool:
        """Refuses a call that arrived in one piece, if no earlier call is running, without creating it. Returns whether
        `data` was answered; otherwise it is still to be parsed."""
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
        """Starts the time limit for headers and the counts of a new call."""
        super().on_message_begin()
        self._in_headers, self._in_call, self._header_bytes = True, True, 0
        self._chunks_before, self._is_behind_size, self._trailer_bytes = self._num_chunks, False, 0
        self._reading.set(self.connection_limiter.limits.header_s, self._on_header_timeout)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Ignores trailers after a chunked body: the call already has the headers, which must not grow (RFC 9110
        6.5.1)."""
        if self._in_headers:
            super().on_header(name, value)

    def on_chunk_header(self) -> None:
        """Counts a chunk; closes the connection if a body has more than MAX_CHUNKS."""
        self._num_chunks += 1
        self._is_behind_size = True
        if self._num_chunks - self._chunks_before > MAX_CHUNKS and not self._is_over:
            self._close_with("body", self._if_unanswered(MANY_CHUNKS))

    def on_body(self, body: bytes) -> None:
        self._is_behind_size = False
        super().on_body(body)

    def on_headers_complete(self) -> None:
        """Starts the time limit for the body, then admits or refuses the call."""
        if self.parser.should_upgrade():  # parsed again without the upgrade
            return
        self._in_headers = False
        self._reading.set(self.connection_limiter.limits.body_s, self._on_body_timeout)
        self._admit_or_refuse()

    def pause_writing(self) -> None:
        """Starts the time limit for a client that does not read its answer."""
        super().pause_writing()
        self._writing.set(self.connection_limiter.limits.write_s, self._on_write_timeout)

    def resume_writing(self) -> None:
        self._writing.clear()
        super().resume_writing()

    def _on_header_timeout(self) -> None:
        """Closes a connection that is too slow with its headers, or idle; waits again if the server itself paused
        reading."""
        if self.flow.read_paused:  # the server itself has paused reading
            self._reading.set(self.connection_limiter.limits.header_s, self._on_header_timeout)
        else:
            self._close_with("headers", TOO_SLOW if self._in_headers else b"")

    def _on_body_timeout(self) -> None:
        """Closes a connection that is too slow with its body; waits again if the server itself paused reading."""
        if self.flow.read_paused:
            self._reading.set(self.connection_limiter.limits.body_s, self._on_body_timeout)
        else:
            self._close_with("body", self._if_unanswered(TOO_SLOW))

    def _if_unanswered(self, response: bytes) -> bytes:
        return b"" if self.cycle is None or self.cycle.response_started else response

    def _on_write_timeout(self) -> None:
        """Aborts the connection of a client that does not read its answer."""
        self.connection_limiter.count_closed("write")
        self.transport.abort()

    def _close_with(self, reason: str, answer: bytes) -> None:
        """Counts the connection as closed for `reason`, sends `answer` if it is not empty, and closes."""
        self.connection_limiter.count_closed(reason)
        self._respond_and_close(answer)

    def _respond_and_close(self, answer: bytes, *, lingers: bool = True) -> None:
        """Sends a last response and closes. With a response the connection lingers: closing it with unread input would
        reset it and lose the response."""
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

    def _admit_or_refuse(self) -> None:
        """Creates the call, or writes the refusal and drops its body. A call that follows an unanswered one in a
        pipeline is always created."""
        is_free = self.cycle is None or self.cycle.response_complete
        answer = type(self).refuse(self.parser.get_method(), self.url, self.headers) if is_free else None
        if answer is None:
            super().on_headers_complete()
            if is_free:
                self._answering = self.cycle
            return
        self.cycle = REFUSED
        if self.parser.get_http_version() == "1.0" or not self.parser.should_keep_alive():
            self._respond_and_close(answer)
        else:
            self.transport.write(answer)
        self.on_response_complete()

    def on_response_complete(self) -> None:
        """Continues with the next call of a pipeline and notes it as the one being answered."""
        following = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        self._answering = following

    def on_message_complete(self) -> None:
        """Ends the time limit for the body; after a refusal, starts the keep-alive timeout."""
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
    """Returns a subclass of the protocol with these hooks and limits as class attributes, as uvicorn requires a
    class."""
    refuse, is_full = staticmethod(admission_hooks.refuse), staticmethod(admission_hooks.is_full)
    return type(
        "BoundHttpProtocol",
        (AdmittingHttpProtocol,),
        {
            "refuse": refuse,
            "is_full": is_full,
            "takes_web_socket": staticmethod(admission_hooks.takes_web_socket),
            "connection_limiter": connections,
        },
    )


@dataclass(frozen=True, slots=True)
class SerializedResponse:
    """A serialized response to which headers can be added per call."""

    status: int
    head: bytes
    body: bytes

    @classmethod
    def from_response(cls, response: Response) -> SerializedResponse:
        """Returns the status line and headers of the response in bytes, and its body."""
        status = HTTPStatus(response.status_code)
        head = [f"HTTP/1.1 {status.value} {status.phrase}".encode()]
        head += [name + b": " + value for name, value in response.raw_headers]
        return cls(status.value, b"\r\n".join(head), bytes(response.body))

    def with_headers(self, headers: Headers) -> bytes:
        more = b"".join([b"\r\n" + name + b": " + value for name, value in headers])
        return b"".join((self.head, more, b"\r\n\r\n", self.body))
