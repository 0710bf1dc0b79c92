"""Connections under TLS, from the moment they are accepted: in the middle of a handshake no protocol knows of them."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable
from typing import Any

from services.frontend.http.connections import Connections

CLOSED_AT_ONCE = 64  # one too many each, before others have a turn of the loop


class Arrived(socket.socket):
    """One that says when it is closed, whoever does that."""

    closing: Callable[[], None] | None = None

    def close(self) -> None:
        closing, self.closing = self.closing, None
        if closing is not None:
            closing()
        super().close()


class Arrivals:
    """Those that are open: how many there may be, and the time that each has for its handshake."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        self._num = 0
        self._of: Counter[str] = Counter()  # by address
        self._timers: dict[int, asyncio.TimerHandle] = {}  # of handshakes, by descriptor

    def greeted(self, descriptor: int) -> None:
        """Its handshake is done."""
        timer = self._timers.pop(descriptor, None)
        if timer is not None:
            timer.cancel()

    def take(self, accepted: socket.socket, address: str) -> Arrived | None:
        """None if it is one too many, and closed."""
        most, most_of_one = self._connections.most_open
        if self._num >= most or self._of[address] >= most_of_one:
            accepted.close()
            self._connections.closed("too_many")
            return None
        arrived = Arrived(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        descriptor = arrived.fileno()
        self._num += 1
        self._of[address] += 1
        loop, limits = asyncio.get_running_loop(), self._connections.limits
        self._timers[descriptor] = loop.call_later(limits.header_s, self._no_handshake, arrived)
        arrived.closing = lambda: self._closing(descriptor, address)
        return arrived

    def _no_handshake(self, arrived: Arrived) -> None:
        self._connections.closed("headers")
        with contextlib.suppress(OSError):  # it has gone by itself
            arrived.shutdown(socket.SHUT_RDWR)

    def _closing(self, descriptor: int, address: str) -> None:
        self.greeted(descriptor)
        self._num -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]


class Listening(socket.socket):
    """Accepts what may come in."""

    def __init__(self, bound: socket.socket, arrivals: Arrivals) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._arrivals = arrivals

    def accept(self) -> tuple[socket.socket, Any]:
        for _ in range(CLOSED_AT_ONCE):
            accepted, address = super().accept()
            arrived = self._arrivals.take(accepted, str(address[0]))
            if arrived is not None:
                return arrived, address
        raise BlockingIOError
