"""Shutdown of a scheduler: its workers move to peers if there are any; otherwise their sequences finish first."""

from __future__ import annotations

import asyncio
import time

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.sessions.frontend_service import FrontendService
from quire.services.scheduler.sessions.worker_balancer import WorkerBalancer
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.settings import SchedulerSettings

log = logger("drain")

POLL_S = 0.02


async def drain(
    settings: SchedulerSettings, cluster: WorkerCluster, frontends: FrontendService, balancer: WorkerBalancer
) -> None:
    """Accepts nothing new. Sequences that are unfinished after drain_timeout_s continue on the schedulers that the
    frontends submit them to again."""
    cluster.draining = True
    frontends.publish()
    deadline = time.monotonic() + settings.drain_timeout_s
    if balancer.addresses:
        await _hand_over(cluster, balancer, deadline)
        frontends.publish()
    while not cluster.idle and time.monotonic() < deadline:
        cluster.tick()
        frontends.publish()
        await asyncio.sleep(POLL_S)
    log.info("drained", finished=cluster.idle)


async def _hand_over(cluster: WorkerCluster, balancer: WorkerBalancer, deadline: float) -> None:
    """Redirects each worker to a peer between two steps, with its KV blocks; frontends follow with the sequences. A
    worker without a peer finishes its sequences here."""
    for replica in cluster.replicas.values():
        replica.leaving = True
        replica.pause()
    waiting = list(cluster.replicas.values())
    while waiting and time.monotonic() < deadline:
        waiting = [replica for replica in waiting if cluster.has(replica)]  # steps of a lost worker never return
        for replica in [r for r in waiting if not r.busy]:
            waiting.remove(replica)
            drain_target = balancer.drain_target()
            if drain_target is None:
                replica.leaving = False
                replica.resume()
                cluster.on_workers_available()
                continue
            log.info("worker handed over", worker=replica.id, to=drain_target)
            replica.send(worker_pb2.AttachResponse(redirect=worker_pb2.Redirect(address=drain_target)))
        await asyncio.sleep(POLL_S)
