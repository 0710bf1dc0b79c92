"""Liveness and readiness of the frontend."""

from __future__ import annotations

from quire.services.frontend.composition.timing import FrontendTiming
from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.shared.process.lifecycle import Shutdown
from quire.shared.process.liveness import Liveness
from quire.shared.rpc.server import Server


class FrontendHealth:
    """Decides whether the process is alive and whether it serves, and updates the gRPC health service accordingly."""

    def __init__(
        self,
        client: SchedulerClient,
        shutdown: Shutdown,
        server: Server,
        timing: FrontendTiming,
        *,
        awaits_worker: bool = False,
    ) -> None:
        """Starts unhealthy. `awaits_worker`: not ready before the first worker, which reports its adapters."""
        self._client = client
        self._awaits_worker = awaits_worker
        self._shutdown = shutdown
        self._server = server
        self._timing = timing
        self._liveness = Liveness(timing.liveness_check_s)

    def is_alive(self) -> bool:
        return self._liveness.is_alive

    def is_serving(self) -> bool:
        """Whether new calls can be answered: a scheduler session is open and the process neither drains nor hangs;
        before the first worker's report only if `awaits_worker` is unset."""
        self._awaits_worker = self._awaits_worker and self._client.limits is None
        is_up = self._client.is_open and self._liveness.is_alive
        return is_up and not self._awaits_worker and not self._shutdown.requested

    def watch_reconnects(self) -> None:
        """Makes liveness depend on progress of the connection attempts."""
        self._liveness.watch(self._client.connections.reconnect_attempts, self._timing.connection_attempt_s)

    async def watch(self) -> None:
        """Runs the liveness check; never returns."""
        await self._liveness.run(self._set_alive)

    async def report(self) -> None:
        """Updates the readiness at each change of the sessions; never returns."""
        while True:
            await self._server.set_serving(self.is_serving())
            await self._client.wait_for_change()

    async def _set_alive(self, is_alive: bool) -> None:
        """Reports a changed liveness to the health service, and the readiness that depends on it."""
        await self._server.set_alive(is_alive)
        await self._server.set_serving(self.is_serving())
