"""Limits on gRPC connections: their number in total and per address, and their idle time.

gRPC enforces the total and the idle time but knows no addresses and does not expose its sockets. This process therefore
scans its own descriptors regularly and shuts down surplus connections of one address.
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

SCAN_INTERVAL_S = 1.0

Options = tuple[tuple[str, int], ...]


def options(connections: ConnectionLimiter) -> Options:
    """Returns the gRPC server options for the limits on connections, handshakes and idle time."""
    limits = connections.limits
    return (
        ("grpc.max_allowed_incoming_connections", connections.max_grpc),
        ("grpc.server_handshake_timeout_ms", 1000 * limits.header_s),
        ("grpc.max_connection_idle_ms", 1000 * limits.grpc_idle_s),
    )


class AddressLimiter:
    """Limits the connections per address on one port, which gRPC itself cannot, by scanning the process's sockets."""

    def __init__(self, port: int, max_per_address: int, on_closed: Callable[[], None]) -> None:
        """Stores the limits. `max_per_address`: connections per address; `on_closed`: called for each closed
        connection."""
        self._port = port
        self._max_per_address = max_per_address
        self._on_closed = on_closed
        self._known: set[str] = set()  # descriptors at the last scan

    async def run(self) -> None:
        """Scans until cancelled; does nothing where the system does not expose a process's descriptors."""
        while True:
            await asyncio.sleep(SCAN_INTERVAL_S)
            await asyncio.to_thread(self.close_surplus)

    def close_surplus(self) -> None:
        """Scans the sockets once and closes surplus connections; those of the last scan stay."""
        descriptors = peer_sockets.descriptors()
        if len(descriptors) > self._max_per_address:
            self._close_surplus(sorted(descriptors, key=lambda descriptor: descriptor not in self._known))
        self._known = set(descriptors)

    def _close_surplus(self, descriptors: list[str]) -> None:
        """Shuts down the connections of an address beyond its limit, and logs their number. `descriptors`: in the order
        of preference."""
        number: Counter[str] = Counter()
        for peer, (address, _) in peer_sockets.connections(descriptors):
            with peer, contextlib.suppress(OSError):
                if peer.getsockname()[1] != self._port:
                    continue
                number[address] += 1
                if number[address] > self._max_per_address:
                    self._on_closed()
                    peer.shutdown(socket.SHUT_RDWR)
        for address, count in number.items():
            if count > self._max_per_address:
                log.warning(
                    "closed surplus connections of one address", address=address, closed=count - self._max_per_address
                )
