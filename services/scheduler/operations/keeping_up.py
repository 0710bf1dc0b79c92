"""Workers that are not as their cluster is to be are brought there: by weights, and into sleep or out of it."""

from __future__ import annotations

import asyncio
from typing import NoReturn

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.wanted_weights import ALL, WEIGHTS
from quire.services.scheduler.operations import quiet
from quire.services.scheduler.replicas.orders import SWAP_TIMEOUT_S
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("operations")

RETRY_S = 5.0
LOOK_S = 0.05
UNDER_WAY = "weights or memory of workers are being changed by another call, or a worker catches up"


class KeepingUp:
    """Beside each worker's session."""

    def __init__(self, cluster: WorkerCluster, changing: asyncio.Lock) -> None:
        """`changing`: is held by whoever changes what is on devices."""
        self._cluster, self._changing = cluster, changing

    async def follow(self, replica: Replica) -> NoReturn:
        """Has a worker that has fallen behind catch up, whenever that happens; until cancelled. Raises Unavailable for
        one of which nobody knows any more how it is: it is to say so anew."""
        while True:
            await replica.fell_behind.wait()
            replica.fell_behind.clear()
            reason = ""
            while replica.outdated:
                if replica.is_unsure:
                    raise Unavailable(f"worker {replica.id} did not say whether it has carried out an order")
                try:
                    await self._catch_up(replica)
                    await asyncio.sleep(LOOK_S)
                except QuireError as error:
                    if error.message != reason:
                        log.warning("a worker stays outdated", worker=replica.id, reason=error.message)
                    reason = error.message
                    await asyncio.sleep(RETRY_S)

    async def _catch_up(self, replica: Replica) -> None:
        while replica.core.has_work and not self._cluster.is_held:
            await asyncio.sleep(LOOK_S)  # what it runs goes on to its end as it has begun
        async with self._changing:
            await quiet.until_quiet([replica])
            wanted = self._cluster.wanted
            if replica.asleep - wanted.asleep:
                tags = replica.asleep - wanted.asleep
                await replica.orders.give(pb.DeviceOrder(wake_up=pb.WakeUp(tags=sorted(tags))))
                replica.asleep -= tags
            if not replica.asleep and wanted.asleep:
                quiet.forget(replica)
                await replica.orders.give(pb.DeviceOrder(sleep=pb.Sleep(level=wanted.sleep_level)))
                replica.asleep = ALL
            elif WEIGHTS not in replica.asleep and not wanted.has_right_weights(replica):
                await self._change_weights(replica)
            replica.sleep_level = wanted.sleep_level if replica.asleep else 0
            wanted.compare(replica)
        if not replica.outdated:
            log.info("a worker has caught up", worker=replica.id, version=replica.weights.version)
            self._cluster.came_back()

    async def _change_weights(self, replica: Replica) -> None:
        wanted = self._cluster.wanted.weights
        if not wanted.path:
            text = f"weights {wanted.version!r} came as a stream and are kept nowhere: update the weights once more"
            raise FailedPrecondition(text)
        quiet.forget(replica)
        await replica.orders.give(pb.DeviceOrder(stage_weights=pb.StageWeights(weights=wanted)))
        swap = pb.DeviceOrder(swap_weights=pb.SwapWeights(update=wanted.update))
        await replica.orders.give(swap, SWAP_TIMEOUT_S)
        replica.weights = wanted
