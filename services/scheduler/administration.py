"""What operators may ask of a scheduler, whichever way they come: by its admin port or through a frontend."""

from __future__ import annotations

import asyncio

from services.scheduler.cluster import Cluster
from services.scheduler.replicas.replica import Replica
from services.scheduler.status import Status
from shared.errors import FailedPrecondition
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.pb.worker.v1 import worker_pb2

QUIET_POLL_S = 0.005


class Administration:
    """Status, and the cache reset."""

    def __init__(self, cluster: Cluster, status: Status) -> None:
        self._cluster = cluster
        self._status = status

    def status(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(services=self._status.services())

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        """All workers or none: a worker with running sequences refuses before any is reset (FailedPrecondition)."""
        replicas = list(self._cluster.replicas.values())
        if not request.preempt_running:
            busy = [replica.id for replica in replicas if len(replica.core.running)]
            if busy:
                raise FailedPrecondition(f"sequences run on {', '.join(busy)}; set preempt_running to reset anyway")
        counts = await asyncio.gather(*(_reset(replica) for replica in replicas))
        return pb.ResetPrefixCacheResponse(num_blocks=sum(counts))


async def _reset(replica: Replica) -> int:
    """Between two steps: nothing is ordered until those under way have returned."""
    replica.pause()
    try:
        while replica.busy:
            await asyncio.sleep(QUIET_POLL_S)
        count = replica.core.reset_prefix_cache(preempt_running=True)
        replica.send(worker_pb2.AttachResponse(cache_reset=worker_pb2.CacheReset()))
    finally:
        replica.resume()
    assert count is not None, "nothing runs after a preemption"
    return count
