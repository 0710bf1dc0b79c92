"""Weight updates of all workers without a restart.

An update has two phases. First every worker stages the new weights: it reads and checks them while it continues with
the old ones. When all workers have staged them, the update is decided; then, between two steps, all swap, and
previously cached prefixes are dropped. A worker that is lost meanwhile, or attaches later, is outdated until it is
reconciled.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.pause_reasons import PauseReason
from quire.services.scheduler.operations import quiesce
from quire.services.scheduler.operations.reconciler import CHANGE_IN_PROGRESS
from quire.services.scheduler.operations.weight_streams import WeightStreams
from quire.services.scheduler.operations.weights_groups import execute_order, leave_group_order
from quire.services.scheduler.replicas.orders import SWAP_TIMEOUT_S
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.process.supervision import Tasks

log = logger("weights")

MAX_VERSION_LENGTH = 128  # characters
MAX_PATH_LENGTH = 4096


class WeightUpdates:
    """Runs one update at a time, including updates of single workers by the reconciler."""

    def __init__(self, cluster: WorkerCluster, changing: asyncio.Lock, count: Callable[[str], None]) -> None:
        """`changing`: lock held during changes of device state; `count`: receives the outcome of each update, one of
        UPDATE_OUTCOMES."""
        self._cluster, self._changing, self._count = cluster, changing, count
        self._tasks = Tasks()
        self.streams = WeightStreams()

    def next_number(self) -> int:
        """Returns an update number greater than any before it, those of other schedulers included."""
        return max(time.time_ns() // 1_000_000, self._cluster.target_state.weights.update + 1)

    @asynccontextmanager
    async def staged(
        self, number: int, request: pb.UpdateWeightsRequest, pieces: AsyncIterator[WeightsPiece] | None = None
    ) -> AsyncIterator[StagedUpdate]:
        """Context in which every worker has staged the weights; on exit, weights that have not been swapped in are
        dropped. `pieces`: weights that come as a stream. Raises QuireError."""
        outcome = "dropped"
        try:
            async with self._staged(number, request, pieces) as update:
                try:
                    yield update
                finally:
                    outcome = "updated" if update.is_decided else "dropped"
        except QuireError:
            outcome = "failed" if outcome == "dropped" else outcome
            raise
        finally:
            self._count(outcome)

    @asynccontextmanager
    async def _staged(
        self, number: int, request: pb.UpdateWeightsRequest, pieces: AsyncIterator[WeightsPiece] | None
    ) -> AsyncIterator[StagedUpdate]:
        """Stages the weights while holding the lock of device changes, and closes the update on exit. Raises
        Unavailable if another change is in progress, FailedPrecondition if `number` is not newer."""
        identity, mode = _checked(number, request, streamed=pieces is not None), request.mode or pb.PAUSE_MODE_WAIT
        if self._changing.locked():
            raise Unavailable(CHANGE_IN_PROGRESS, retry_after_ms=1000)
        async with self._changing:
            if number <= self._cluster.target_state.weights.update:
                raise FailedPrecondition(f"update: {number} must be greater than the number of the current weights")
            update = StagedUpdate(self._cluster, identity, mode, self._tasks)
            try:
                await (update.stage() if pieces is None else update.stage_stream(self.streams, pieces))
                yield update
            finally:
                update.close()


class StagedUpdate:
    """Single update of all workers, from staging to the swap or the end of the attempt; pauses generation in between
    where necessary."""

    def __init__(
        self, cluster: WorkerCluster, identity: model_pb2.WeightsIdentity, mode: pb.PauseMode, tasks: Tasks
    ) -> None:
        self._cluster, self._identity, self._mode, self._tasks = cluster, identity, mode, tasks
        self._staged: list[Replica] = []
        self._is_held = False
        self._num_aborted = 0
        self.is_decided = False  # the update takes effect on all workers, now or when they attach

    async def stage(self, stream_id: bytes = b"") -> None:
        """Has all workers stage the weights; pauses generation first if a worker cannot stage next to its steps.
        Waits for all workers, then raises the first error; with a stream, raises it at once."""
        replicas = [replica for replica in self._cluster.replicas.values() if not replica.leaving]
        if not all(replica.hello.weights_state.stages_beside_steps for replica in replicas):
            await self._hold()
        self._staged = replicas  # includes workers whose staging may fail
        order = worker_pb2.StageWeights(weights=self._identity, stream_id=stream_id)
        orders = [execute_order(replica, worker_pb2.DeviceOrder(stage_weights=order)) for replica in replicas]
        if stream_id:  # the first error ends the stream for all workers
            await asyncio.gather(*orders)
            return
        for outcome in await asyncio.gather(*orders, return_exceptions=True):
            if isinstance(outcome, BaseException):
                raise outcome

    async def stage_stream(self, streams: WeightStreams, pieces: AsyncIterator[WeightsPiece]) -> None:
        """Relays a stream to all workers, as fast as the slowest takes it. Nothing is stored here."""
        workers = [replica.id for replica in self._cluster.replicas.values() if not replica.leaving]
        with streams.open(workers) as stream:
            pumping = self._tasks.start("weights that pass through", stream.pump(pieces))
            staging = self._tasks.start("the staging of weights", self.stage(stream.id))
            try:
                await asyncio.wait({pumping, staging}, return_when=asyncio.FIRST_EXCEPTION)
                for task in (staging, pumping):  # a worker's error says more than the stream's end
                    if task.done():
                        task.result()
            finally:
                pumping.cancel()
                staging.cancel()
                await asyncio.gather(pumping, staging, return_exceptions=True)
        if stream.group:
            await self._receive(stream.group)

    async def _receive(self, group: str) -> None:
        """Has all workers receive a broadcast, after all have checked its description. A failure from here on ends the
        group, because some ranks have received more than others."""
        self._identity.encoder_update = self._cluster.target_state.weights.encoder_update  # it stays as it is
        order = worker_pb2.ReceiveWeights(update=self._identity.update)
        receiving = [execute_order(replica, worker_pb2.DeviceOrder(receive_weights=order)) for replica in self._staged]
        try:
            await asyncio.gather(*receiving)
        except BaseException:
            for replica in self._staged:
                replica.orders.send_order(leave_group_order(group))
            raise

    @property
    def num_workers(self) -> int:
        """Number of workers that have staged the weights."""
        return len(self._staged)

    async def swap(self) -> pb.UpdateWeightsResponse:
        """Decides the update and swaps the weights on all workers, to the end even if the caller is cancelled.
        Workers that attach later are reconciled. Raises QuireError before the decision only."""
        if not self._is_held:
            await self._hold()
        swapping = self._tasks.start("a swap of weights", self._swap())
        try:
            await asyncio.shield(swapping)
        except asyncio.CancelledError:
            await asyncio.wait([swapping])
            raise
        replicas = self._cluster.replicas.values()
        return pb.UpdateWeightsResponse(
            weight_version=self._identity.version,
            num_workers=sum(not replica.outdated for replica in replicas),
            num_kept=self._cluster.num_waiting + self._cluster.num_running,
            num_aborted=self._num_aborted,
        )

    async def _hold(self) -> None:
        """Pauses generation, so that no answer mixes two versions of weights, unless the mode asks for it."""
        self._is_held = True
        self._num_aborted = await quiesce.pause_cluster(self._cluster, PauseReason.WEIGHTS, self._mode)
        if self._mode == pb.PAUSE_MODE_WAIT and self._cluster.num_begun:
            text = (
                "must not be wait while generation is paused and started requests wait; keep continues them with "
                "the new weights"
            )
            raise FailedPrecondition(f"mode: {text}, abort ends them", field="mode")
        for replica in self._cluster.replicas.values():
            if (
                not replica.hello.weights_state.stages_beside_steps
            ):  # it loses the content of its blocks, whether or not staging succeeds
                quiesce.drop_prefix_cache(replica)

    async def _swap(self) -> None:
        """Sets the target weights, drops the prefix caches and swaps the weights of the workers that have staged
        them; others become outdated and lose their waiting sequences. Raises FailedPrecondition if a newer update
        was decided, Unavailable if all workers are gone."""
        cluster = self._cluster
        if cluster.target_state.weights.update > (number := self._identity.update):  # equal: already decided
            raise FailedPrecondition(f"update: {number} must not be less than the number of the current weights")
        attached = [replica for replica in self._staged if cluster.has(replica)]
        if self._staged and not attached:
            raise Unavailable("the workers that staged the new weights have disconnected", retry_after_ms=1000)
        self._staged = []
        cluster.target_state.weights = self._identity
        self.is_decided = True
        for replica in attached:
            quiesce.drop_prefix_cache(replica)
        await asyncio.gather(*(self._swap_one(replica) for replica in attached))
        for replica in cluster.replicas.values():
            cluster.target_state.update_outdated(replica)
            if replica.outdated:
                cluster.reassign_waiting(replica)
        cluster.on_workers_available()
        log.info("weights updated", version=self._identity.version, workers=len(attached))

    async def _swap_one(self, replica: Replica) -> None:
        """Swaps the weights of one worker; a worker that fails becomes outdated."""
        order = worker_pb2.DeviceOrder(swap_weights=worker_pb2.SwapWeights(update=self._identity.update))
        try:
            await replica.orders.execute(order, SWAP_TIMEOUT_S)
        except Unavailable as error:
            replica.state_unknown = True
            log.warning("a worker may not have the new weights", worker=replica.id, reason=error.message)
        except QuireError as error:
            log.warning("a worker could not swap in the new weights", worker=replica.id, reason=error.message)
        else:
            replica.weights = self._identity

    def close(self) -> None:
        """Has workers drop weights that were staged but not swapped in, and ends the update's pause of generation."""
        for replica in self._staged:
            replica.orders.send_order(worker_pb2.DeviceOrder(drop_weights=worker_pb2.DropWeights()))
        if self._is_held:
            self._cluster.set_paused(PauseReason.WEIGHTS, False)


def _checked(number: int, request: pb.UpdateWeightsRequest, *, streamed: bool) -> model_pb2.WeightsIdentity:
    """Returns the identity of the requested weights; a streamed update has no path, and the version is the number by
    default. Raises InvalidArgument for an invalid path or version."""
    path, version = request.path, request.weight_version or str(number)
    if streamed:
        path = ""
    elif not path or "\0" in path or len(path) > MAX_PATH_LENGTH:
        raise InvalidArgument(f"path: {path!r:.80} must be the path of a folder", field="path")
    if not version.isprintable() or len(version) > MAX_VERSION_LENGTH:
        text = f"weight_version: must have at most {MAX_VERSION_LENGTH} printable characters, got {version!r:.80}"
        raise InvalidArgument(text, field="weight_version")
    return model_pb2.WeightsIdentity(update=number, version=version, path=path, encoder_update=number)
