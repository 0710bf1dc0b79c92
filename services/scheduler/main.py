"""Composition root of the scheduler service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.cluster_view import gauges_of
from quire.services.scheduler.operations import stat_loggers
from quire.services.scheduler.operations.administration import SchedulerAdministration
from quire.services.scheduler.operations.reconciler import WorkerReconciler
from quire.services.scheduler.operations.status import SchedulerStatus
from quire.services.scheduler.prefix_directory.directory import PrefixDirectory
from quire.services.scheduler.prefix_directory.registry import SchedulerRegistry
from quire.services.scheduler.sessions import scheduler_service, worker_service
from quire.services.scheduler.sessions.drain import drain
from quire.services.scheduler.sessions.frontend_service import FrontendService
from quire.shared import logs, prefix_index
from quire.shared.metrics import base
from quire.shared.metrics.scheduler import ClusterCollector, DirectoryMetrics, SchedulerMetrics
from quire.shared.pb.scheduler.v1 import scheduler_pb2_grpc
from quire.shared.pb.worker.v1 import worker_pb2_grpc
from quire.shared.process import lifecycle, numpy_buffers
from quire.shared.process.garbage import Collector
from quire.shared.process.liveness import Liveness
from quire.shared.process.supervision import run_restarting
from quire.shared.rpc.admin_port import AdminPort
from quire.shared.rpc.admin_service import AdminService
from quire.shared.rpc.server import Server
from quire.shared.rpc.trust import HandshakeAcceptor, check_exposure
from quire.shared.settings import SchedulerSettings
from quire.shared.tracing import open_traces

SERVICES = (scheduler_service.SERVICE_NAME, worker_service.SERVICE_NAME)
HEALTH_INTERVAL_S = 0.5
ROUND_PATIENCE_S = 30.0  # maximum time without a round of status updates, which takes milliseconds

Announce = Callable[..., None]  # takes role, name, and addresses by kind


async def serve(
    settings: SchedulerSettings, shutdown: lifecycle.Shutdown, announce: Announce = lifecycle.announce_ready
) -> None:
    """Configures logging, starts a scheduler and its metrics page, and serves until `shutdown`, then drains; always
    stops the servers at the end. `announce`: is called with the addresses once they answer."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    registry = CollectorRegistry()
    base.add_process_collectors(registry)
    collector = Collector()
    scheduler = Scheduler(settings, registry, shutdown, collector)
    page = base.MetricsPage(
        settings.host, settings.metrics_port, base.of(registry), settings.tls, share=settings.share_ports
    )
    numpy_buffers.preallocate()
    lifecycle.freeze_startup_objects(collector)
    try:
        await scheduler.run(settings.reachable(page.port), announce)
    finally:
        await scheduler.stop()
        page.close()


class Scheduler:
    """Creates the components of the service and runs them."""

    def __init__(
        self,
        settings: SchedulerSettings,
        registry: CollectorRegistry,
        shutdown: lifecycle.Shutdown,
        collector: Collector,
    ) -> None:
        check_exposure(settings)
        self._settings = settings
        self._shutdown = shutdown
        metrics = SchedulerMetrics(registry)
        self.traces = open_traces(settings)
        self.cluster = WorkerCluster(settings, time.monotonic, metrics, self.traces)
        door = HandshakeAcceptor(settings.cluster_secret(), settings.title)
        self.frontends = FrontendService(settings, self.cluster, door)
        self.status = SchedulerStatus(settings, self.cluster, self.frontends)
        registry.register(
            ClusterCollector(
                lambda: self.cluster.terms.model_name, self.status.workers, lambda: gauges_of(self.cluster)
            )
        )
        self.reporter = stat_loggers.StatsReporter(
            stat_loggers.find(settings.stat_loggers),
            settings.stats_interval_s,
            lambda: self.cluster.terms.model_name,
            self.status.workers,
        )
        self.directory = self._directory(DirectoryMetrics(registry))
        changing = asyncio.Lock()
        administration = SchedulerAdministration(self.cluster, self.status, changing, metrics, self.frontends.publish)
        self.workers = worker_service.WorkerService(
            settings,
            self.cluster,
            metrics,
            door,
            on_change=self.frontends.publish,
            on_garbage=collector.request_collection,
            directory=self.directory,
            reconciler=WorkerReconciler(self.cluster, changing),
            streams=administration.updates.streams,
        )
        self.server = Server(
            settings.host, settings.grpc_port, SERVICES, share_port=settings.share_ports, tls=settings.tls
        )
        self.status.address = door.address = settings.reachable(self.server.port)
        self.status.directory = self.directory
        self.admin = AdminPort(settings, AdminService(administration, shutdown), self.server.port)
        worker_pb2_grpc.add_WorkerServiceServicer_to_server(self.workers, self.server.methods)
        service = scheduler_service.SchedulerService(self.frontends, administration, door)
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(service, self.server.methods)

    async def run(self, metrics_address: str, announce: Announce) -> None:
        """Starts the gRPC and admin servers, announces readiness, and serves until shutdown, then drains. An error
        in an essential background loop ends the service. `metrics_address`: address to announce."""
        settings = self._settings
        await self.server.start()
        await self.admin.start()
        await self.server.set_serving(True)
        announce(
            "scheduler", settings.name, grpc=self.status.address, metrics=metrics_address, admin=self.admin.address
        )
        liveness = Liveness()
        liveness.watch(lambda: {"views": self.frontends.num_rounds}, ROUND_PATIENCE_S)
        loops = [
            run_restarting("liveness", lambda: liveness.run(self.server.set_alive)),
            run_restarting("views", self.frontends.publish_views),
            run_restarting("health", lambda: _report_health(self.server, self.status)),
            run_restarting("stat loggers", self.reporter.run, is_needed=False),
        ]
        if self.directory is not None:
            loops.append(run_restarting("prefix directory", self.directory.run, is_needed=False))
        await lifecycle.run_until_first(self._serve(), *loops)

    async def _serve(self) -> None:
        await self._shutdown.wait()
        await drain(self._settings, self.cluster, self.frontends, self.workers.balancer)

    async def stop(self) -> None:
        await self.admin.stop()
        await self.server.stop(grace_s=0.2)
        await asyncio.to_thread(self.traces.close)

    def _directory(self, metrics: DirectoryMetrics) -> PrefixDirectory | None:
        """Creates the publisher of prefix caches and of the registry entry in Redis; None if the setting redis is
        "none". Does not connect yet."""
        settings = self._settings
        if settings.redis == "none":
            return None
        redis = prefix_index.connect(settings.redis, password_file=settings.redis_password_file, tls=settings.tls)
        keys = prefix_index.RegistryKeys(settings.redis_namespace)
        malformed = prefix_index.MalformedEntries(lambda kind: metrics.malformed.labels(kind).inc())
        registry = SchedulerRegistry(redis, keys, self._entry, malformed)
        return PrefixDirectory(redis, registry, settings.name, metrics)

    def _entry(self) -> prefix_index.SchedulerEntry:
        num_workers = sum(not replica.leaving for replica in self.cluster.replicas.values())
        own = self._settings.name, self.status.address, self.frontends.epoch
        return prefix_index.SchedulerEntry(*own, num_workers, self.cluster.draining)


async def _report_health(server: Server, status: SchedulerStatus) -> None:
    """Sets the gRPC health status periodically until cancelled: serving unless a worker's steps stall while there is
    work."""
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        await server.set_serving(not status.stalled)
