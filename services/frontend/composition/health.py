"""Whether this frontend lives, and whether it takes requests."""

from __future__ import annotations

from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.shared.process.lifecycle import Shutdown
from quire.shared.process.liveness import Liveness
from quire.shared.rpc.server import Server

ATTEMPT_PATIENCE_S = 60.0  # with one attempt to reach a scheduler, which takes 10 at most


class FrontendHealth:
    """Owns the watch over the process, and tells the gRPC health service."""

    def __init__(
        self, client: SchedulerClient, shutdown: Shutdown, server: Server, *, awaits_worker: bool = False
    ) -> None:
        """`awaits_worker`: it does not serve before the first worker, whose adapters are listed from then on."""
        self._client = client
        self._awaits_worker = awaits_worker
        self._shutdown = shutdown
        self._server = server
        self._liveness = Liveness()

    def is_alive(self) -> bool:
        return self._liveness.is_alive

    def is_serving(self) -> bool:
        self._awaits_worker = self._awaits_worker and self._client.limits is None
        is_up = self._client.is_open and self._liveness.is_alive
        return is_up and not self._awaits_worker and not self._shutdown.requested

    def watch_reconnects(self) -> None:
        """From now on attempts to reach a scheduler have to get ahead."""
        self._liveness.watch(self._client.connections.reconnect_attempts, ATTEMPT_PATIENCE_S)

    async def watch(self) -> None:
        """Never ends."""
        await self._liveness.run(self._tell_alive)

    async def report(self) -> None:
        """At each change of the sessions. Never ends."""
        while True:
            await self._server.set_serving(self.is_serving())
            await self._client.wait_for_change()

    async def _tell_alive(self, is_alive: bool) -> None:
        await self._server.set_alive(is_alive)
        await self._server.set_serving(self.is_serving())
