"""What operators may ask of a scheduler, whichever way they come: by its admin port or through a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from services.scheduler.cluster import Cluster
from services.scheduler.replicas.replica import Replica
from services.scheduler.status import Status
from shared.errors import FailedPrecondition
from shared.logs import logger
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.pb.worker.v1 import worker_pb2

log = logger("administration")

QUIET_POLL_S = 0.005


class Administration:
    """Status, the cache reset, the pause of generation, and adapters."""

    def __init__(self, cluster: Cluster, status: Status, on_change: Callable[[], None]) -> None:
        """`on_change`: tells frontends at once what they may name."""
        self._cluster = cluster
        self._status = status
        self._on_change = on_change

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

    async def pause_generation(self, request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        """Returns once no step and no transfer is under way on any worker."""
        if request.mode == pb.PAUSE_MODE_WAIT:
            await self._run_empty()
        self._cluster.hold(True)
        aborts = request.mode == pb.PAUSE_MODE_ABORT
        num_aborted = self._cluster.abort() if aborts else 0
        while any(replica.busy or replica.moves_blocks for replica in self._cluster.replicas.values()):
            await asyncio.sleep(QUIET_POLL_S)
        num_kept = self._cluster.num_waiting + self._cluster.num_running
        log.info("generation paused", kept=num_kept, aborted=num_aborted)
        return pb.PauseGenerationResponse(num_kept=num_kept, num_aborted=num_aborted)

    async def _run_empty(self) -> None:
        """Until workers have nothing left, or somebody else has paused generation; then what came waits. Raises
        FailedPrecondition if generation is resumed first. Leaves nothing behind if it is cancelled."""
        cluster = self._cluster
        if cluster.paused:
            return
        cluster.park(True)
        try:
            while cluster.parking and cluster.num_placed:
                await asyncio.sleep(QUIET_POLL_S)
            if not (cluster.parking or cluster.paused):
                raise FailedPrecondition("generation was resumed before what runs had ended")
        except asyncio.CancelledError:
            cluster.park(False)
            raise

    async def resume_generation(self, _request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        self._cluster.hold(False)
        log.info("generation resumed")
        return pb.ResumeGenerationResponse()

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Returns once every worker has it, and frontends have been told. Raises QuireError."""
        loaded = await self._cluster.adapters.load(request, self._cluster.terms.model_name)
        self._on_change()
        return loaded

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Returns once frontends have been told. Raises NotFound, FailedPrecondition."""
        unloaded = await self._cluster.adapters.unload(request.name)
        self._on_change()
        return unloaded

    async def list_adapters(self) -> pb.ListAdaptersResponse:
        return self._cluster.adapters.listed()


async def _reset(replica: Replica) -> int:
    """Between two steps: nothing is ordered until those under way have returned, and transfers as well."""
    replica.pause()
    try:
        while replica.busy or replica.moves_blocks:
            await asyncio.sleep(QUIET_POLL_S)
        count = replica.core.reset_prefix_cache(preempt_running=True)
        replica.send(worker_pb2.AttachResponse(cache_reset=worker_pb2.CacheReset()))
    finally:
        replica.resume()
    assert count is not None, "nothing runs after a preemption"
    return count
