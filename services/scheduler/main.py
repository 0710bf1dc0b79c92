"""Composition root of the scheduler."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry

from services.scheduler.admin_service import AdminService
from services.scheduler.cluster import Cluster
from services.scheduler.frontend_service import FrontendService
from services.scheduler.status import Status
from services.scheduler.worker_service import WorkerService
from shared import lifecycle, logs
from shared.metrics import base
from shared.metrics.scheduler import ClusterCollector, SchedulerMetrics
from shared.pb.admin.v1 import admin_pb2_grpc
from shared.pb.scheduler.v1 import scheduler_pb2_grpc
from shared.pb.worker.v1 import worker_pb2_grpc
from shared.rpc.server import Server
from shared.settings import SchedulerSettings

SERVICES = ("quire.scheduler.v1.SchedulerService", "quire.worker.v1.WorkerService", "quire.admin.v1.AdminService")
HEALTH_INTERVAL_S = 0.5
DRAIN_POLL_S = 0.05

log = logs.logger("scheduler")


async def serve(settings: SchedulerSettings, shutdown: lifecycle.Shutdown) -> None:
    """Runs a scheduler until `shutdown`, then drains it."""
    logs.configure(settings.name, settings.log_level, settings.log_format)
    registry = CollectorRegistry()
    metrics = SchedulerMetrics(registry)
    cluster = Cluster(time.monotonic, metrics, settings.max_waiting)
    frontends = FrontendService(settings, cluster)
    status = Status(settings, cluster, frontends)
    registry.register(ClusterCollector(lambda: cluster.terms.model_name, status.workers, cluster.gauges))

    server = Server(settings.host, settings.grpc_port, SERVICES)
    workers = WorkerService(settings, cluster, metrics, frontends.publish)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(workers, server.grpc)
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(frontends, server.grpc)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(cluster, status, shutdown), server.grpc)
    base.add_process_collectors(registry)
    page = base.Page(settings.host, settings.metrics_port, registry)
    await server.start()
    await server.set_serving(True)
    status.address = settings.reachable(server.port)
    lifecycle.announce("scheduler", settings.name, grpc=status.address, metrics=settings.reachable(page.port))
    try:
        await lifecycle.first(shutdown.wait(), frontends.publish_views(), _report_health(server, status))
        await _drain(settings, cluster, frontends)
    finally:
        await server.stop(grace_s=0.2)
        page.close()


async def _report_health(server: Server, status: Status) -> None:
    """Healthy means that steps advance while there is work."""
    while True:
        await asyncio.sleep(HEALTH_INTERVAL_S)
        await server.set_serving(not status.stalled)


async def _drain(settings: SchedulerSettings, cluster: Cluster, frontends: FrontendService) -> None:
    """Takes nothing new and finishes what is here; what is left at the end goes on where the frontends resubmit it."""
    cluster.draining = True
    frontends.publish()
    deadline = time.monotonic() + settings.drain_timeout_s
    while not cluster.idle and time.monotonic() < deadline:
        cluster.tick()
        await asyncio.sleep(DRAIN_POLL_S)
    log.info("drained", finished=cluster.idle)
