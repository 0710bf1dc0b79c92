"""Sleep of all workers: they release device memory and take it back later.

While something sleeps no step runs. Existing and new sequences wait, as during a pause; their KV is computed again
afterwards.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.pause_reasons import PauseReason
from quire.services.scheduler.cluster.target_state import ALL, WEIGHTS
from quire.services.scheduler.operations import quiesce
from quire.services.scheduler.operations.reconciler import CHANGE_IN_PROGRESS
from quire.services.scheduler.replicas.orders import with_worker_name
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.errors import InvalidArgument, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.process.supervision import Tasks

log = logger("operations")

LEVELS = (1, 2)


class SleepOperations:
    """Sleep and wake-up of the cluster, one change at a time."""

    def __init__(self, cluster: WorkerCluster, changing: asyncio.Lock) -> None:
        """`changing`: lock held during changes of device state."""
        self._cluster, self._changing = cluster, changing
        self._tasks = Tasks()

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Pauses generation and puts all workers to sleep, or none: if one refuses, the others are woken up. Raises
        InvalidArgument for an unknown level, Unavailable while another change is in progress, and the workers'
        QuireError."""
        level = request.level or 1
        if level not in LEVELS:
            raise InvalidArgument(f"level: must be 1 or 2, got {level}", field="level")
        self._check_free()
        async with self._changing:
            cluster, target = self._cluster, self._cluster.target_state
            if WEIGHTS in target.asleep and target.sleep_level != level:
                text = f"level: the workers already sleep at level {target.sleep_level}; wake them up first"
                raise InvalidArgument(text, field="level")
            before = target.asleep, target.sleep_level
            try:
                num_aborted = await quiesce.pause_cluster(cluster, PauseReason.SLEEP, request.mode)
                await self._run_to_completion(self._sleep_all(level))
            except BaseException:
                if (target.asleep, target.sleep_level) == before:
                    cluster.set_paused(PauseReason.SLEEP, bool(before[0]))
                raise
            num_kept = cluster.num_waiting + cluster.num_running
            return pb.SleepResponse(num_kept=num_kept, num_aborted=num_aborted)

    async def wake_up(self, request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        """Wakes all workers, or the parts of them named by tags; generation resumes when nothing sleeps. If one
        worker cannot take its memory back, no worker runs steps. Raises QuireError."""
        tags = frozenset(request.tags) or ALL
        if tags - ALL:
            text = f"tags: must be among {', '.join(sorted(ALL))}, got {min(tags - ALL)!r:.40}"
            raise InvalidArgument(text, field="tags")
        self._check_free()
        async with self._changing:
            await self._run_to_completion(self._wake(tags))
            return pb.WakeUpResponse(asleep=sorted(self._cluster.target_state.asleep))

    def _check_free(self) -> None:
        if self._changing.locked():
            raise Unavailable(CHANGE_IN_PROGRESS, retry_after_ms=1000)

    async def _run_to_completion(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` to its end, even if the caller is cancelled."""
        task = self._tasks.start("a change of sleep", work)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            raise

    async def _sleep_all(self, level: int) -> None:
        """Drops the prefix caches and puts all workers to sleep. If one refuses, wakes the others again, unless the
        cluster was asleep before, and raises the first error."""
        cluster, target = self._cluster, self._cluster.target_state
        replicas = list(cluster.replicas.values())
        for replica in replicas:
            quiesce.drop_prefix_cache(replica)
        order = worker_pb2.Sleep(level=level)
        refusals = await self._order(replicas, worker_pb2.DeviceOrder(sleep=order), frozenset(), ALL, level)
        if refusals:
            wake = worker_pb2.DeviceOrder(wake_up=worker_pb2.WakeUp())
            await self._order([r for r in replicas if r.asleep == ALL and not target.asleep], wake, ALL, frozenset(), 0)
            raise refusals[0]
        target.set_sleep(ALL, level)
        for replica in cluster.replicas.values():  # workers that attached meanwhile
            target.update_outdated(replica)
        log.info("workers are asleep", level=level, workers=len(replicas))

    async def _wake(self, tags: frozenset[str]) -> None:
        """Wakes the parts named by `tags` on all workers that have them asleep, updates the target state and resumes
        generation if nothing sleeps. Raises the first worker's error."""
        cluster, target = self._cluster, self._cluster.target_state
        replicas = [replica for replica in cluster.replicas.values() if replica.asleep & tags]
        order = worker_pb2.DeviceOrder(wake_up=worker_pb2.WakeUp(tags=sorted(tags)))
        refusals = await self._order(replicas, order, tags, frozenset(), target.sleep_level)
        if refusals:
            raise refusals[0]
        target.clear_sleep(tags)
        for replica in cluster.replicas.values():
            replica.sleep_level = target.sleep_level
            target.update_outdated(replica)
            if replica.outdated:
                cluster.reassign_waiting(replica)
        cluster.set_paused(PauseReason.SLEEP, bool(target.asleep))
        log.info("workers are awake", tags=sorted(tags), workers=len(replicas), asleep=sorted(target.asleep))

    async def _order(
        self,
        replicas: list[Replica],
        order: worker_pb2.DeviceOrder,
        minus: frozenset[str],
        plus: frozenset[str],
        level: int,
    ) -> list[QuireError]:
        """Sends an order to all workers and updates the sleep state of those that executed it by `minus` and `plus`.
        Returns the errors of the others."""

        async def one(replica: Replica) -> QuireError | None:
            """Sends the order to one worker and updates its sleep state; returns its error. A worker that did not
            answer is forced to attach again."""
            own = worker_pb2.DeviceOrder()
            own.CopyFrom(order)
            try:
                await replica.orders.execute(own)
            except QuireError as error:
                replica.state_unknown = isinstance(error, Unavailable)
                if replica.state_unknown and not self._cluster.has(replica):
                    return None  # lost: its hello reports its state when it attaches again
                if replica.state_unknown:
                    replica.outdated = True
                    replica.became_outdated.set()  # forces it to attach again
                return with_worker_name(replica.id, error)
            replica.asleep = (replica.asleep - minus) | plus
            replica.sleep_level = level if replica.asleep else 0
            return None

        outcomes = await asyncio.gather(*(one(replica) for replica in replicas))
        return [outcome for outcome in outcomes if outcome is not None]
