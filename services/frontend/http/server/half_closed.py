"""Keeps serving clients that close their writing half after the request and wait for the answer.

Such a client looks like one that has disconnected; only a write distinguishes the two, since a closed socket answers it
with a reset. The probes are bytes of a valid answer: its status line, byte by byte, or leading zeros of the next
chunk's size.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

STATUS_LINE_START = b"HTTP/1.1 "
ZERO = b"0"  # leading zero of a chunk's hexadecimal size
# Seconds between probes. The first provokes a reset, the second detects it; later ones detect later disconnects. Their
# number stays below the digits that parsers accept in a chunk's size.
PAUSES_S = (0.1, 0.4, 2.0, 8.0, 32.0, 64.0)


class HalfClosedTransport:
    """Replaces the transport of a request whose client has half-closed, and probes whether the client still reads, with
    the first bytes of the answer or empty chunk data."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        """Wraps the transport and sends the first probe; the connection will not be kept alive after `cycle`."""
        self._transport = transport
        self._cycle = cycle
        self._has_begun = cycle.response_started
        self._num_probes = 0
        self._timer: asyncio.TimerHandle | None = None
        cycle.keep_alive = False  # the client cannot send another request
        self._probe()

    def write(self, data: bytes) -> None:
        """Writes a piece of the answer, without the first bytes that were sent as probes."""
        if not self._has_begun:
            self._has_begun = True
            data = data[self._num_probes :]  # the probes were its first bytes
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.stop()
        self._transport.close()

    def stop(self) -> None:
        """Stops sending probes to the client; the transport stays open."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        """Sends one probe and schedules the next, until the answer is complete, the transport closes or PAUSES_S is
        used up."""
        if self._cycle.response_complete or self._transport.is_closing():
            return
        if not self._has_begun:
            self._transport.write(STATUS_LINE_START[self._num_probes : self._num_probes + 1])
        elif self._cycle.chunked_encoding:
            self._transport.write(ZERO)
        if self._num_probes < len(PAUSES_S):
            self._timer = asyncio.get_running_loop().call_later(PAUSES_S[self._num_probes], self._probe)
        self._num_probes += 1
