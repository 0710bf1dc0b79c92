"""Accepts TLS connections and counts them from the start, since protocols only see them after the handshake.

Event loops do not report accepted connections (uvloop, which services use, accepts on the descriptor itself), so this
module accepts them.
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

ACCEPTED_AT_ONCE = 64  # before the event loop runs other tasks
PAUSE_S = 1.0  # after accept failed for want of descriptors

Protocols = Callable[[], asyncio.Protocol]


class WatchedSocket(socket.socket):
    """A socket that calls `closing` once when it is closed, by any party."""

    closing: Callable[[], None] | None = None

    def close(self) -> None:
        """Calls `closing`, at the first call only, and closes the socket."""
        closing, self.closing = self.closing, None
        if closing is not None:
            closing()
        super().close()


class TlsListener:
    """A server in asyncio's sense that limits the number of open connections and the time of each handshake."""

    def __init__(self, listening: socket.socket, context: ssl.SSLContext, connections: ConnectionLimiter) -> None:
        self._listening, self._context, self._connections = listening, context, connections
        self._num = 0
        self._of: Counter[str] = Counter()  # by address
        self._handshakes = Tasks()
        self._is_open = False

    def start(self, protocols: Protocols) -> None:
        """Starts accepting. `protocols`: creates a protocol per completed handshake."""
        self._protocols, self._is_open = protocols, True
        self._listen()

    def close(self) -> None:
        """Stops accepting new connections; handshakes continue until wait_closed()."""
        if self._is_open:
            self._is_open = False
            asyncio.get_running_loop().remove_reader(self._listening)

    async def wait_closed(self) -> None:
        """Cancels the handshakes that are not finished."""
        await self._handshakes.close()

    def _listen(self) -> None:
        """Resumes accepting after a pause, unless the listener is closed."""
        if self._is_open:
            asyncio.get_running_loop().add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        """Accepts up to ACCEPTED_AT_ONCE connections and starts their handshakes. After an error, such as no free
        descriptor, pauses for PAUSE_S."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                raw_socket, address = self._listening.accept()
            except (BlockingIOError, ConnectionAbortedError):
                return
            except OSError as error:
                log.error("cannot accept connections", reason=str(error))
                loop = asyncio.get_running_loop()
                loop.remove_reader(self._listening)
                loop.call_later(PAUSE_S, self._listen)
                return
            connection = self._admit(raw_socket, str(address[0]))
            if connection is not None:
                self._handshakes.start("handshake", self._handshake(connection))

    def _admit(self, raw_socket: socket.socket, address: str) -> WatchedSocket | None:
        """Counts and wraps an accepted socket; returns None, and closes it, if a limit on connections is exceeded."""
        max_open, max_per_address = self._connections.max_open
        if self._num >= max_open or self._of[address] >= max_per_address:
            raw_socket.close()
            self._connections.count_closed("too_many")
            return None
        connection = WatchedSocket(raw_socket.family, raw_socket.type, raw_socket.proto, fileno=raw_socket.detach())
        connection.setblocking(False)
        self._num += 1
        self._of[address] += 1
        connection.closing = lambda: self._on_closed(address)
        return connection

    async def _handshake(self, connection: WatchedSocket) -> None:
        """Completes the TLS handshake and creates the protocol, within the time for headers; closes the connection on
        failure."""
        is_done = False
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocols, connection, ssl=self._context, ssl_handshake_timeout=self._connections.limits.header_s
            )
            is_done = True
        except ConnectionAbortedError:  # raised by the loop for a handshake timeout
            self._connections.count_closed("headers")
        except OSError:  # the peer has disconnected, or does not speak TLS
            pass
        finally:
            if not is_done:
                connection.close()

    def _on_closed(self, address: str) -> None:
        """Ends the count of a connection of this address."""
        self._num -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]
