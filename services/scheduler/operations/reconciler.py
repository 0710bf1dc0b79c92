"""Brings outdated workers to the cluster's target state: weights and sleep."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.target_state import ALL, WEIGHTS
from quire.services.scheduler.operations import quiesce
from quire.services.scheduler.replicas.orders import SWAP_TIMEOUT_S
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("operations")

RETRY_S = 5.0
LOOK_S = 0.05
CHANGE_IN_PROGRESS = "weights or memory of workers are being changed by another call, or a worker is being updated"


class WorkerReconciler:
    """Reconciles one worker at a time; run() runs next to each worker's session."""

    def __init__(self, cluster: WorkerCluster, changing: asyncio.Lock) -> None:
        """`changing`: lock held during changes of device state."""
        self._cluster, self._changing = cluster, changing

    async def run(self, replica: Replica) -> NoReturn:
        """Reconciles a worker whenever it becomes outdated, until cancelled. Raises Unavailable if the worker's state
        is unknown: it has to attach again."""
        while True:
            await replica.became_outdated.wait()
            replica.became_outdated.clear()
            reason = ""
            while replica.outdated:
                if replica.state_unknown:
                    raise Unavailable(f"worker {replica.id} did not report whether it has executed an order")
                try:
                    await self._reconcile(replica)
                    await asyncio.sleep(LOOK_S)
                except QuireError as error:
                    if error.message != reason:
                        log.warning("a worker is still outdated", worker=replica.id, reason=error.message)
                    reason = error.message
                    await asyncio.sleep(RETRY_S)

    async def _reconcile(self, replica: Replica) -> None:
        """Waits until the worker is idle or the cluster is paused, then brings it closer to the target: wakes it,
        puts it to sleep, or changes its weights. Raises the worker's QuireError; then it stays outdated."""
        while replica.core.has_work and not self._cluster.is_paused:
            await asyncio.sleep(LOOK_S)  # running sequences finish with the weights that they started with
        async with self._changing:
            await quiesce.wait_until_quiescent([replica])
            target = self._cluster.target_state
            if replica.asleep - target.asleep:
                tags = replica.asleep - target.asleep
                await replica.orders.execute(pb.DeviceOrder(wake_up=pb.WakeUp(tags=sorted(tags))))
                replica.asleep -= tags
            if not replica.asleep and target.asleep:
                quiesce.drop_prefix_cache(replica)
                await replica.orders.execute(pb.DeviceOrder(sleep=pb.Sleep(level=target.sleep_level)))
                replica.asleep = ALL
            elif WEIGHTS not in replica.asleep and not target.has_right_weights(replica):
                await self._change_weights(replica)
            replica.sleep_level = target.sleep_level if replica.asleep else 0
            target.update_outdated(replica)
        if not replica.outdated:
            log.info("a worker is up to date", worker=replica.id, version=replica.weights.version)
            self._cluster.on_workers_available()

    async def _change_weights(self, replica: Replica) -> None:
        """Drops the worker's prefix cache and has it stage and swap in the target weights from their path. Raises
        FailedPrecondition if they came as a stream, because streams are not stored."""
        weights = self._cluster.target_state.weights
        if not weights.path:
            text = f"the weights {weights.version!r} were sent as a stream and are not stored; update the weights again"
            raise FailedPrecondition(text)
        quiesce.drop_prefix_cache(replica)
        await replica.orders.execute(pb.DeviceOrder(stage_weights=pb.StageWeights(weights=weights)))
        swap = pb.DeviceOrder(swap_weights=pb.SwapWeights(update=weights.update))
        await replica.orders.execute(swap, SWAP_TIMEOUT_S)
        replica.weights = weights
