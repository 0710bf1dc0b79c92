"""Workers that are not as their cluster is to be are brought there: by weights, and into sleep or out of it."""

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
CHANGE_IN_PROGRESS = "weights or memory of workers are being changed by another call, or a worker catches up"


class WorkerReconciler:
    """Beside each worker's session."""

    def __init__(self, cluster: WorkerCluster, changing: asyncio.Lock) -> None:
        """`changing`: is held by whoever changes what is on devices."""
        self._cluster, self._changing = cluster, changing

    async def run(self, replica: Replica) -> NoReturn:
        """Has a worker that has fallen behind catch up, whenever that happens; until cancelled. Raises Unavailable for
        one of which nobody knows any more how it is: it is to say so anew."""
        while True:
            await replica.became_outdated.wait()
            replica.became_outdated.clear()
            reason = ""
            while replica.outdated:
                if replica.state_unknown:
                    raise Unavailable(f"worker {replica.id} did not say whether it has carried out an order")
                try:
                    await self._reconcile(replica)
                    await asyncio.sleep(LOOK_S)
                except QuireError as error:
                    if error.message != reason:
                        log.warning("a worker stays outdated", worker=replica.id, reason=error.message)
                    reason = error.message
                    await asyncio.sleep(RETRY_S)

    async def _reconcile(self, replica: Replica) -> None:
        while replica.core.has_work and not self._cluster.is_paused:
            await asyncio.sleep(LOOK_S)  # what it runs goes on to its end as it has begun
        async with self._changing:
            await quiesce.wait_until_quiescent([replica])
            wanted = self._cluster.target_state
            if replica.asleep - wanted.asleep:
                tags = replica.asleep - wanted.asleep
                await replica.orders.execute(pb.DeviceOrder(wake_up=pb.WakeUp(tags=sorted(tags))))
                replica.asleep -= tags
            if not replica.asleep and wanted.asleep:
                quiesce.drop_prefix_cache(replica)
                await replica.orders.execute(pb.DeviceOrder(sleep=pb.Sleep(level=wanted.sleep_level)))
                replica.asleep = ALL
            elif WEIGHTS not in replica.asleep and not wanted.has_right_weights(replica):
                await self._change_weights(replica)
            replica.sleep_level = wanted.sleep_level if replica.asleep else 0
            wanted.update_outdated(replica)
        if not replica.outdated:
            log.info("a worker has caught up", worker=replica.id, version=replica.weights.version)
            self._cluster.on_workers_available()

    async def _change_weights(self, replica: Replica) -> None:
        wanted = self._cluster.target_state.weights
        if not wanted.path:
            text = f"weights {wanted.version!r} came as a stream and are kept nowhere: update the weights once more"
            raise FailedPrecondition(text)
        quiesce.drop_prefix_cache(replica)
        await replica.orders.execute(pb.DeviceOrder(stage_weights=pb.StageWeights(weights=wanted)))
        swap = pb.DeviceOrder(swap_weights=pb.SwapWeights(update=wanted.update))
        await replica.orders.execute(swap, SWAP_TIMEOUT_S)
        replica.weights = wanted
