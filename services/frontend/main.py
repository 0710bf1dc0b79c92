"""Starts and stops the parts of a frontend in order; composition/ assembles them."""

from __future__ import annotations

import asyncio
import sys

from quire.services.frontend.bounds.prompt_limit import PromptLimit
from quire.services.frontend.composition.core import FrontendCore
from quire.services.frontend.composition.grpc_port import GrpcPort
from quire.services.frontend.composition.grpc_services import GrpcServices
from quire.services.frontend.composition.health import FrontendHealth
from quire.services.frontend.composition.http_port import LAST_WRITES_S, HttpPort
from quire.services.frontend.composition.ingress import Ingress
from quire.services.frontend.composition.loop_delay import watch_loop_delay
from quire.services.frontend.composition.media_port import MediaPort
from quire.services.frontend.composition.served_model import ServedModel
from quire.services.frontend.composition.shared_state import SharedState
from quire.services.frontend.composition.timing import DEFAULT_TIMING, FrontendTiming
from quire.services.frontend.offline.service import OfflineService
from quire.shared import logs, ports
from quire.shared.metrics.base import MetricsDocument, MetricsPage
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.process.lifecycle import Shutdown, announce_ready, freeze_startup_objects, run_until_first
from quire.shared.process.supervision import Tasks, run_restarting, run_vital
from quire.shared.settings.frontend import FrontendSettings

log = logs.logger("frontend")

# Tokenizer threads hold the interpreter's lock while converting arguments and results. With CPython's default of 5 ms
# the event loop would wait that long each time it polls, which it does several times for a first token.
SWITCH_INTERVAL_S = 5e-4


async def serve(settings: FrontendSettings, shutdown: Shutdown) -> None:
    """Runs a frontend until `shutdown` and the following drain, and closes it. Raises errors that prevent serving, such
    as a port in use, before the model is loaded."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    _check_ports(settings)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    frontend = Frontend(settings, shutdown)
    frontend.warm_up()
    freeze_startup_objects()
    try:
        await frontend.run()
    finally:
        await frontend.close()


def _check_ports(settings: FrontendSettings) -> None:
    """Checks that all ports can be bound, before the model is loaded. Raises the error that binding would."""
    for field in ("http_port", "grpc_port"):
        ports.check(settings.host, getattr(settings, field), field, share=settings.share_ports)
    if settings.metrics_port >= 0:
        ports.check(settings.metrics_host, settings.metrics_port, "metrics_port", share=settings.share_ports)
    ports.check(settings.admin_host, settings.admin_port, "admin_port")


class Frontend:
    """Composition root of one frontend process: owns its servers, the core and the background tasks."""

    def __init__(self, settings: FrontendSettings, shutdown: Shutdown, timing: FrontendTiming = DEFAULT_TIMING) -> None:
        self._settings = settings
        self._shutdown = shutdown
        self._tasks = Tasks()
        self.model = ServedModel(settings)
        self.metrics = FrontendMetrics(self.model.identity.name, self.model.context)
        self.redis = SharedState(settings, self.metrics, timing)
        self.ingress = Ingress(settings, self.metrics, self.redis.access, self._prompt_limit)
        self._grpc = GrpcPort(settings, self.ingress)
        self.media = MediaPort(settings, None if self.model.media is None else self.model.media.store)
        self.core = FrontendCore(
            settings,
            self.model,
            self.ingress,
            self.redis,
            address=self._grpc.address,
            media_address=self.media.address,
            timing=timing,
        )
        self._health = FrontendHealth(
            self.core.client, shutdown, self._grpc.server, timing, awaits_worker=settings.health_awaits_worker
        )
        parts = (self.model, self.ingress, self.core)
        self._offline = OfflineService(
            settings,
            self.ingress.access,
            self.ingress.bodies,
            self.metrics.batches,
            lambda: shutdown.requested,
            poll_s=timing.batch_poll_s,
        )
        services = GrpcServices(
            settings,
            self._grpc,
            *parts,
            health=self._health,
            offline=self._offline.work,
            shutdown=shutdown,
            stalled_upload_s=timing.stalled_upload_s,
        )
        self.admin = services.admin
        self.http = HttpPort(settings, *parts, services=services, health=self._health, offline=self._offline)
        self._metrics_page = None if settings.metrics_port < 0 else self._new_metrics_page(settings.metrics_port)

    @property
    def grpc_address(self) -> str:
        return self._grpc.address

    @property
    def http_address(self) -> str:
        return self.http.address

    @property
    def metrics_address(self) -> str:
        """Address of the metrics page, which needs no API key; empty if there is none."""
        return "" if self._metrics_page is None else f"{self._settings.metrics_host}:{self._metrics_page.port}"

    def _new_metrics_page(self, port: int) -> MetricsPage:
        settings = self._settings
        return MetricsPage(settings.metrics_host, port, self._own_metrics, settings.tls, share=settings.share_ports)

    def _own_metrics(self, _path: str) -> MetricsDocument:
        return MetricsDocument(self.metrics.page(tenants=True))

    def _prompt_limit(self) -> PromptLimit:
        """Returns the present prompt limit; a callback, since the ingress is built before the core."""
        return self.core.prompt_limit()

    def warm_up(self) -> None:
        """Starts the helper processes that the first large body and the first long conversation need."""
        self.ingress.warm_up()
        self.model.warm_up()

    async def run(self) -> None:
        """Starts the servers and all background tasks, and runs until one of them fails or the drain after `shutdown`
        is over."""
        await self._grpc.server.start()
        await self.media.start()
        await self.admin.start()
        serving = run_vital("the HTTP server", self.http.server.run(), may_end=lambda: self._shutdown.requested)
        http = self._tasks.start("http", serving)
        await self.http.server.listening()
        self._tasks.start("announcement", self._announce())
        self._health.watch_reconnects()
        background = [
            run_restarting("liveness", self._health.watch),
            run_vital("the sessions with schedulers", self.core.client.run()),
            run_restarting("health", self._health.report),
            run_restarting("gRPC connections", self._grpc.watch.run, is_needed=False),
            run_restarting("loop delay", lambda: watch_loop_delay(self.metrics), is_needed=False),
            *self.redis.tasks(),
            *self.core.streams.tasks(),
            *self._offline.tasks(),
        ]
        await run_until_first(http, *background, self._drain_when_asked(http))

    async def _announce(self) -> None:
        """Announces the addresses once a scheduler session is open, so that clients find a ready frontend."""
        while not self.core.client.is_open:
            await self.core.client.wait_for_change()
        announce_ready(
            "frontend",
            self._settings.name,
            http=self.http_address,
            grpc=self.grpc_address,
            admin=self.admin.address,
            **({"metrics": self.metrics_address} if self.metrics_address else {}),
        )

    async def _drain_when_asked(self, http: asyncio.Task[None]) -> None:
        """Waits for `shutdown`; then refuses new calls, waits for running ones for at most drain_timeout_s, and stops
        the servers."""
        await self._shutdown.wait()
        self.ingress.admission.close()
        await self._grpc.server.set_serving(False)
        try:
            async with asyncio.timeout(self._settings.drain_timeout_s):
                await self.ingress.admission.wait_idle()
        except TimeoutError:
            log.warning("exiting with unfinished samples", samples=self.ingress.admission.num_samples)
        await self._grpc.server.stop(LAST_WRITES_S)
        self.http.server.stop()
        await http

    async def close(self) -> None:
        """Stops the tasks and servers, releases the streams' leases, and ends the child processes."""
        await self._tasks.close()
        await self._grpc.server.stop(0)
        await self.media.stop()
        await self.admin.stop()
        await self.core.streams.close()
        await self.redis.close()
        if self._metrics_page is not None:
            self._metrics_page.close()
        await self.ingress.close()
        await self.model.close()
