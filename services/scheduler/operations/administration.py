"""Operator calls to a scheduler, from its admin port or through a frontend."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.pause_reasons import PauseReason
from quire.services.scheduler.operations import quiesce
from quire.services.scheduler.operations.sleeping import SleepOperations
from quire.services.scheduler.operations.status import SchedulerStatus
from quire.services.scheduler.operations.weight_updates import WeightUpdates
from quire.services.scheduler.operations.weights_groups import WeightsGroups
from quire.shared.errors import FailedPrecondition, Unavailable
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.admin.v1 import admin_pb2 as pb

log = logger("administration")


class SchedulerAdministration:
    """Status, cache reset, pausing, weights, sleep, and adapters."""

    def __init__(
        self,
        cluster: WorkerCluster,
        status: SchedulerStatus,
        changing: asyncio.Lock,
        metrics: SchedulerMetrics,
        on_change: Callable[[], None],
    ) -> None:
        """`changing`: lock held during changes of device state; `on_change`: publishes the available adapters to
        frontends."""
        self.updates = WeightUpdates(
            cluster, changing, lambda outcome: metrics.operations.weight_updates[outcome].inc()
        )
        self.groups = WeightsGroups(cluster, changing)
        self._sleeping = SleepOperations(cluster, changing)
        self._cluster = cluster
        self._status = status
        self._on_change = on_change

    def status(self) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(services=self._status.services())

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        """Resets the prefix caches of all workers, or of none, and releases the rows of media that no worker waits for.
        With running sequences it raises FailedPrecondition, unless preempt_running is set."""
        replicas = list(self._cluster.replicas.values())
        if not request.preempt_running:
            busy = [replica.id for replica in replicas if len(replica.core.running)]
            if busy:
                raise FailedPrecondition(f"sequences run on {', '.join(busy)}; set preempt_running to reset anyway")
        self._cluster.encoders.release_unused()
        counts = await asyncio.gather(*(quiesce.reset_worker(self._cluster, replica) for replica in replicas))
        return pb.ResetPrefixCacheResponse(num_blocks=sum(counts))

    async def pause_generation(self, request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        """Pauses generation; returns once no step and no transfer is in flight on any worker."""
        num_aborted = await quiesce.pause_cluster(self._cluster, PauseReason.OPERATOR, request.mode)
        num_kept = self._cluster.num_waiting + self._cluster.num_running
        log.info("generation paused", kept=num_kept, aborted=num_aborted)
        return pb.PauseGenerationResponse(num_kept=num_kept, num_aborted=num_aborted)

    async def resume_generation(self, _request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        self._cluster.set_paused(PauseReason.OPERATOR, False)
        log.info("generation resumed")
        return pb.ResumeGenerationResponse()

    async def update_weights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        """Updates the weights of this scheduler's workers alone; with several schedulers, call a frontend. Raises
        QuireError."""
        async with self.updates.staged(self.updates.next_number(), request) as update:
            if not update.num_workers:
                raise Unavailable("no worker is attached whose weights could be updated", retry_after_ms=1000)
            return await update.swap()

    async def init_weights_update_group(
        self, request: pb.InitWeightsUpdateGroupRequest
    ) -> pb.InitWeightsUpdateGroupResponse:
        """Joins this scheduler's workers to a trainer's group. Raises QuireError."""
        return await self.groups.init(request)

    async def destroy_weights_update_group(
        self, request: pb.DestroyWeightsUpdateGroupRequest
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        """Removes this scheduler's workers from a trainer's group. Raises QuireError."""
        return await self.groups.destroy(request)

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Puts all workers to sleep; returns when they sleep. Raises QuireError."""
        return await self._sleeping.sleep(request)

    async def wake_up(self, request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        """Wakes all workers; returns when they are awake. Raises QuireError."""
        return await self._sleeping.wake_up(request)

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Loads an adapter; returns once every worker has it and frontends have been notified. Raises QuireError."""
        loaded = await self._cluster.adapters.load(request, self._cluster.terms.model_name)
        self._on_change()
        return loaded

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Unloads an adapter; returns once frontends have been notified. Raises NotFound or FailedPrecondition."""
        unloaded = await self._cluster.adapters.unload(request.name)
        self._on_change()
        return unloaded

    async def list_adapters(self) -> pb.ListAdaptersResponse:
        return self._cluster.adapters.list_adapters()
