"""Waiting for a cluster or worker without steps and transfers in flight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.pause_reasons import PauseReason
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2

QUIET_POLL_S = 0.005


async def pause_cluster(cluster: WorkerCluster, reason: PauseReason, mode: pb.PauseMode) -> int:
    """Pauses the cluster; returns once no step and no transfer is in flight, with the number of aborted sequences. If
    this raises before the pause, the cluster is not paused."""
    if mode == pb.PAUSE_MODE_WAIT:
        await _drain_running(cluster)
    cluster.set_paused(reason, True)
    num_aborted = cluster.abort() if mode == pb.PAUSE_MODE_ABORT else 0
    await wait_until_quiescent(cluster.replicas.values())
    return num_aborted


async def wait_until_quiescent(replicas: Iterable[Replica]) -> None:
    """Waits until no worker has steps or transfers in flight; `replicas` may change meanwhile."""
    while not all(replica.is_quiescent for replica in replicas):
        await asyncio.sleep(QUIET_POLL_S)


async def _drain_running(cluster: WorkerCluster) -> None:
    """Waits until all started sequences have ended, or another call has paused generation; new sequences wait. Raises
    FailedPrecondition if generation is resumed first. If it is cancelled, new sequences are placed again."""
    if cluster.is_paused:
        return
    cluster.set_parking(True)
    try:
        while cluster.assignments.parking and (cluster.assignments.num_placed or cluster.num_begun):
            await asyncio.sleep(QUIET_POLL_S)
        if not (cluster.assignments.parking or cluster.is_paused):
            raise FailedPrecondition("generation was resumed before the running sequences had ended")
    except asyncio.CancelledError:
        cluster.set_parking(False)
        raise


def drop_prefix_cache(replica: Replica) -> int:
    """Drops all cached prefixes of a quiescent worker; running sequences are preempted. Returns the number of
    blocks."""
    count = replica.core.reset_prefix_cache(preempt_running=True)
    assert count is not None, "nothing runs after a preemption"
    return count


async def reset_worker(cluster: WorkerCluster, replica: Replica) -> int:
    """Resets a worker's prefix cache between two steps: pauses it until its steps and transfers have ended. Returns 0
    for a worker that is lost meanwhile."""
    replica.pause()
    try:
        while not replica.is_quiescent and cluster.has(replica):
            await asyncio.sleep(QUIET_POLL_S)
        if not cluster.has(replica):
            return 0
        count = drop_prefix_cache(replica)
        replica.send(worker_pb2.AttachResponse(cache_reset=worker_pb2.CacheReset()))
    finally:
        replica.resume()
    return count
