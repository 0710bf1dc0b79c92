"""gRPC's connections: how many there may be, in all and of one address, and for how long without a call.

gRPC itself keeps the first and the last bound, but knows nothing of addresses and gives nobody its sockets. So from
time to time this process looks through its own descriptors and shuts those down that are too many of one address.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.services.frontend.http.server.connections import Connections
from quire.shared.logs import logger

log = logger("grpc")

LOOK_EVERY_S = 1.0
DESCRIPTORS = Path("/proc/self/fd")

Options = tuple[tuple[str, int], ...]


def options(connections: Connections) -> Options:
    """For the server."""
    limits = connections.limits
    return (
        ("grpc.max_allowed_incoming_connections", connections.most_of_grpc),
        ("grpc.server_handshake_timeout_ms", 1000 * limits.header_s),
        ("grpc.max_connection_idle_ms", 1000 * limits.grpc_idle_s),
    )


class AddressWatch:
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
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Who was there before stays."""
        descriptors = os.listdir(DESCRIPTORS) if DESCRIPTORS.exists() else []
        if len(descriptors) > self._most:
            self._close_surplus(sorted(descriptors, key=lambda descriptor: descriptor not in self._known))
        self._known = set(descriptors)

    def _close_surplus(self, descriptors: list[str]) -> None:
        number: Counter[str] = Counter()
        for address, held in self._connections(descriptors):
            with held:
                number[address] += 1
                if number[address] > self._most:
                    with contextlib.suppress(OSError):
                        held.shutdown(socket.SHUT_RDWR)
                    self._on_closed()
        for address, count in number.items():
            if count > self._most:
                log.warning("too many connections of one address", address=address, closed=count - self._most)

    def _connections(self, descriptors: list[str]) -> Iterator[tuple[str, socket.socket]]:
        """Each by a descriptor of our own, so that it stays the same one whatever gRPC closes meanwhile."""
        for text in descriptors:
            with contextlib.suppress(OSError):
                own = os.dup(int(text))
                if not stat.S_ISSOCK(os.fstat(own).st_mode):
                    os.close(own)
                    continue
                held = socket.socket(fileno=own)
                address = self._client(held)
                if address:
                    yield address, held
                else:
                    held.close()

    def _client(self, held: socket.socket) -> str:
        """Who is at the other end; empty if it is none of this port's connections."""
        if held.family not in (socket.AF_INET, socket.AF_INET6) or held.type != socket.SOCK_STREAM:
            return ""
        try:
            return str(held.getpeername()[0]) if held.getsockname()[1] == self._port else ""
        except OSError:  # it listens, or has ended
            return ""
