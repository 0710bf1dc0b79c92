"""Connections under TLS, from the moment they are accepted: in the middle of a handshake no protocol knows of them.

They are accepted here, because loops do not tell of it: uvloop, on which services run, takes what it finds behind the
descriptor.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable

from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter
from quire.shared.logs import logger
from quire.shared.process.supervision import Tasks

log = logger("http")

ACCEPTED_AT_ONCE = 64  # before others have a turn of the loop
PAUSE_S = 1.0  # where the process has no descriptor left

Protocols = Callable[[], asyncio.Protocol]


class WatchedSocket(socket.socket):
    """One that says when it is closed, whoever does that."""

    closing: Callable[[], None] | None = None

    def close(self) -> None:
        closing, self.closing = self.closing, None
        if closing is not None:
            closing()
        super().close()


class TlsListener:
    """A server in asyncio's sense. Knows those that are open: how many there may be, and the time that each has for its
    handshake."""

    def __init__(self, listening: socket.socket, context: ssl.SSLContext, connections: ConnectionLimiter) -> None:
        self._listening, self._context, self._connections = listening, context, connections
        self._num = 0
        self._of: Counter[str] = Counter()  # by address
        self._handshakes = Tasks()
        self._is_open = False

    def start(self, protocols: Protocols) -> None:
        """`protocols`: a new one for each connection whose handshake is done."""
        self._protocols, self._is_open = protocols, True
        self._listen()

    def close(self) -> None:
        """Nobody else comes."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Who has not greeted by now does not."""
        await self._handshakes.close()

    def _listen(self) -> None:
        if self._is_open:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("no connection can be accepted", reason=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(PAUSE_S, self._listen)
                return
            arrived = self._take(accepted, str(address[0]))
            if arrived is not None:
                self._handshakes.start("handshake", self._greet(arrived))

    def _take(self, accepted: socket.socket, address: str) -> WatchedSocket | None:
        """None if it is one too many, and closed."""
        most, most_of_one = self._connections.max_open
        if self._num >= most or self._of[address] >= most_of_one:
            accepted.close()
            self._connections.count_closed("too_many")
            return None
        arrived = WatchedSocket(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        arrived.setblocking(False)
        self._num += 1
        self._of[address] += 1
        arrived.closing = lambda: self._left(address)
        return arrived

    async def _greet(self, arrived: WatchedSocket) -> None:
        greeted = False
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocols, arrived, ssl=self._context, ssl_handshake_timeout=self._connections.limits.header_s
            )
            greeted = True
        except ConnectionAbortedError:  # what loops say of a handshake that takes too long
            self._connections.count_closed("headers")
        except OSError:  # it has gone, or speaks no TLS
            pass
        finally:
            if not greeted:
                arrived.close()

    def _left(self, address: str) -> None:
        self._num -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]
