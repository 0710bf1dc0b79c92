"""gRPC's connections: how many there may be, in all and of one address, and for how long without a call.

gRPC itself keeps the first and the last bound, but knows nothing of addresses and gives nobody its sockets. So from
time to time this process looks through its own descriptors and shuts those down that are too many of one address.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections import Counter
from collections.abc import Callable

from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter
from quire.shared.logs import logger
from quire.shared.rpc import peer_sockets

log = logger("grpc")

LOOK_EVERY_S = 1.0

Options = tuple[tuple[str, int], ...]


def options(connections: ConnectionLimiter) -> Options:
    """For the server."""
    limits = connections.limits
    return (
        ("grpc.max_allowed_incoming_connections", connections.max_grpc),
        ("grpc.server_handshake_timeout_ms", 1000 * limits.header_s),
        ("grpc.max_connection_idle_ms", 1000 * limits.grpc_idle_s),
    )


class AddressLimiter:
    """Over the connections to one port."""

    def __init__(self, port: int, most: int, on_closed: Callable[[], None]) -> None:
        """`most`: of one address."""
        self._port = port
        self._most = most
        self._on_closed = on_closed
        self._known: set[str] = set()  # descriptors at the last look

    async def run(self) -> None:
        """Until cancelled; does nothing where the system does not show a process its descriptors."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.close_surplus)

    def close_surplus(self) -> None:
        """Closes surplus connections; those that were there at the last look stay."""
        descriptors = peer_sockets.descriptors()
        if len(descriptors) > self._most:
            self._close_surplus(sorted(descriptors, key=lambda descriptor: descriptor not in self._known))
        self._known = set(descriptors)

    def _close_surplus(self, descriptors: list[str]) -> None:
        number: Counter[str] = Counter()
        for held, (address, _) in peer_sockets.connections(descriptors):
            with held, contextlib.suppress(OSError):
                if held.getsockname()[1] != self._port:
                    continue
                number[address] += 1
                if number[address] > self._most:
                    self._on_closed()
                    held.shutdown(socket.SHUT_RDWR)
        for address, count in number.items():
            if count > self._most:
                log.warning("too many connections of one address", address=address, closed=count - self._most)
