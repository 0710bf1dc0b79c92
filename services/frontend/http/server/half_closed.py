"""Clients that close their writing half once the request is sent, and wait for the answer.

To the server that looks like a client that has gone: only a write tells them apart, since a socket that is closed
answers it with a reset. The bytes written for that are part of any answer: the beginning of its status line, one by
one, or zeros in front of the size of the next chunk.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

BEGINNING = b"HTTP/1.1 "  # of every answer
ZERO = b"0"  # in front of a chunk's size, which is hexadecimal
# Seconds from one probe to the next. The first is answered with the reset, the second meets it; the others find clients
# that leave later. Fewer than a parser takes as digits of a chunk's size.
PAUSES_S = (0.1, 0.4, 2.0, 8.0, 32.0, 64.0)


class HalfClosedTransport:
    """Stands for the transport of a cycle whose client says nothing more, and probes whether it still listens."""

    def __init__(self, transport: asyncio.Transport, cycle: RequestResponseCycle) -> None:
        """Probes at once."""
        self._transport = transport
        self._cycle = cycle
        self._has_begun = cycle.response_started
        self._num_probes = 0
        self._timer: asyncio.TimerHandle | None = None
        cycle.keep_alive = False  # no other request can follow
        self._probe()

    def write(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            data = data[self._num_probes :]  # each was a byte of it
        self._transport.write(data)

    def is_closing(self) -> bool:
        return self._transport.is_closing()

    def close(self) -> None:
        self.stop()
        self._transport.close()

    def stop(self) -> None:
        """Ends the probes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _probe(self) -> None:
        if self._cycle.response_complete or self._transport.is_closing():
            return
        if not self._has_begun:
            self._transport.write(BEGINNING[self._num_probes : self._num_probes + 1])
        elif self._cycle.chunked_encoding:
            self._transport.write(ZERO)
        if self._num_probes < len(PAUSES_S):
            self._timer = asyncio.get_running_loop().call_later(PAUSES_S[self._num_probes], self._probe)
        self._num_probes += 1
