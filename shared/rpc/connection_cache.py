"""Cache of gRPC channels to services whose addresses are learned from others."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import grpc.aio

    from quire.shared.rpc.trust import Dialler

MAX_CHANNELS = 16


@dataclass(slots=True)
class CachedConnection:
    """Channel to a service. Closing cancels its calls, so an evicted connection is closed by its last user."""

    channel: grpc.aio.Channel
    num_users: int = 0
    is_evicted: bool = False


class ConnectionCache:
    """Owns the channels, by address; the least recently used ones are evicted."""

    def __init__(self, dialler: Dialler, max_channels: int = MAX_CHANNELS) -> None:
        self._dialler, self._max_channels = dialler, max_channels
        self._connections: OrderedDict[str, CachedConnection] = OrderedDict()

    @asynccontextmanager
    async def connected(self, address: str) -> AsyncIterator[CachedConnection]:
        """Yields a connection to `address`, opened or cached, and counts its user; evicts the least recently used ones
        above `max_channels`. An evicted connection is closed by its last user."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = CachedConnection(self._dialler.connect(address))
        self._connections.move_to_end(address)
        connection.num_users += 1
        try:
            await self._evict_oldest()
            yield connection
        finally:
            connection.num_users -= 1
            if connection.is_evicted and not connection.num_users:
                await connection.channel.close()

    def evict(self, address: str, connection: CachedConnection) -> None:
        """Removes a connection from the cache, unless another one has replaced it already."""
        connection.is_evicted = True
        if self._connections.get(address) is connection:
            del self._connections[address]

    async def close(self) -> None:
        """Closes all connections, which cancels their calls."""
        while self._connections:
            _, connection = self._connections.popitem()
            await connection.channel.close()

    async def _evict_oldest(self) -> None:
        """Removes the least recently used connections above `max_channels`; closes those without users."""
        while len(self._connections) > self._max_channels:
            address, connection = next(iter(self._connections.items()))
            self.evict(address, connection)
            if not connection.num_users:
                await connection.channel.close()
