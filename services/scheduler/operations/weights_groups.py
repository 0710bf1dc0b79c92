"""Process groups in which a trainer broadcasts weights to all ranks of all workers."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.pause_reasons import PauseReason
from quire.services.scheduler.operations import quiesce
from quire.services.scheduler.operations.reconciler import CHANGE_IN_PROGRESS
from quire.services.scheduler.replicas.orders import with_worker_name
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.tensor_headers import DEFAULT_GROUP

log = logger("weights")

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
BACKENDS = ("nccl", "gloo")
MAX_ADDRESS_LENGTH = 255
MAX_RANKS = 1 << 16
MAX_TIMEOUT_MS = 540_000  # shorter than a worker's time for an order
DEFAULT_TIMEOUT_MS = 120_000


class WeightsGroups:
    """Membership is stored by the workers alone, so it outlives the scheduler."""

    def __init__(self, cluster: WorkerCluster, changing: asyncio.Lock) -> None:
        """`changing`: lock held during changes of device state."""
        self._cluster, self._changing = cluster, changing

    async def init(
        self, request: pb.InitWeightsUpdateGroupRequest, first_rank: int = 0, num_ranks: int = 0
    ) -> pb.InitWeightsUpdateGroupResponse:
        """Joins all workers to a group, or none. `first_rank`: first rank of these workers, which have `num_ranks`
        ranks together; 0: there are no other schedulers. Raises InvalidArgument for an invalid request or a
        group that is too small, Unavailable while another change is in progress or no worker is attached,
        FailedPrecondition if workers attached or detached meanwhile, and the error of a worker that cannot join."""
        order = _checked(request)
        if self._changing.locked():
            raise Unavailable(CHANGE_IN_PROGRESS, retry_after_ms=1000)
        async with self._changing:
            replicas = self._replicas()
            orders = _join_orders(order, first_rank or request.rank_offset, replicas)
            count = sum(_num_ranks(replica) for replica in replicas)
            if num_ranks and count != num_ranks:
                raise FailedPrecondition(
                    f"workers attached or detached during the call: they have {count} ranks, not {num_ranks}; repeat it"
                )
            _check_size(request, count)
            await self._join(order.group_name, replicas, orders)
        log.info("joined a trainer's group", group=order.group_name, ranks=count, backend=order.backend)
        return pb.InitWeightsUpdateGroupResponse(num_ranks=count)

    async def destroy(self, request: pb.DestroyWeightsUpdateGroupRequest) -> pb.DestroyWeightsUpdateGroupResponse:
        """Removes all workers from a group, after operations in progress. Raises QuireError."""
        name = _name(request.group_name)
        async with self._changing:
            replicas = self._replicas()
            await self._order(replicas, [leave_group_order(name) for _ in replicas])
        return pb.DestroyWeightsUpdateGroupResponse()

    def _replicas(self) -> list[Replica]:
        attached = [replica for replica in self._cluster.replicas.values() if not replica.leaving]
        return sorted(attached, key=lambda replica: replica.id)

    async def _join(self, name: str, replicas: Sequence[Replica], orders: Sequence[worker_pb2.DeviceOrder]) -> None:
        """Sends the join orders; if one fails, has all workers leave the group again and raises the error."""
        try:
            await self._order(replicas, orders)
        except BaseException:
            for replica in replicas:
                replica.orders.send_order(leave_group_order(name))
            raise

    async def _order(self, replicas: Sequence[Replica], orders: Sequence[worker_pb2.DeviceOrder]) -> None:
        """Sends the orders and raises the first error: the other workers may wait for the one that failed."""
        needs_pause = not all(replica.hello.weights_state.stages_beside_steps for replica in replicas)
        if needs_pause:
            await quiesce.pause_cluster(self._cluster, PauseReason.WEIGHTS, pb.PAUSE_MODE_KEEP)
        try:
            await asyncio.gather(*(execute_order(*pair) for pair in zip(replicas, orders, strict=True)))
        finally:
            if needs_pause:
                self._cluster.set_paused(PauseReason.WEIGHTS, False)


async def execute_order(replica: Replica, order: worker_pb2.DeviceOrder) -> None:
    """Executes an order. Raises QuireError with the worker's name."""
    try:
        await replica.orders.execute(order)
    except QuireError as error:
        raise with_worker_name(replica.id, error) from None


def leave_group_order(name: str) -> worker_pb2.DeviceOrder:
    return worker_pb2.DeviceOrder(leave_weights_group=worker_pb2.LeaveWeightsGroup(group_name=name))


def _check_size(request: pb.InitWeightsUpdateGroupRequest, count: int) -> None:
    """Raises InvalidArgument if the group is too small for `count` ranks, Unavailable if there are none."""
    if not count:
        raise Unavailable("no worker is attached that could join a group", retry_after_ms=1000)
    if request.rank_offset + count > request.world_size:
        text = (
            f"world_size: must be at least {request.rank_offset + count}, for {count} ranks of workers from rank "
            f"{request.rank_offset} on; got"
        )
        raise InvalidArgument(f"{text} {request.world_size}", field="world_size")


def _num_ranks(replica: Replica) -> int:
    return replica.hello.parallelism.num_ranks or 1


def _join_orders(
    order: worker_pb2.JoinWeightsGroup, first_rank: int, replicas: Sequence[Replica]
) -> list[worker_pb2.DeviceOrder]:
    """Returns a join order for each worker, with consecutive ranks from `first_rank` on."""
    orders = []
    for replica in replicas:
        order.first_rank = first_rank
        orders.append(worker_pb2.DeviceOrder(join_weights_group=order))
        first_rank += _num_ranks(replica)
    return orders


def _name(name: str) -> str:
    """Returns the group's name, the default one for an empty name. Raises InvalidArgument for an invalid name."""
    if not NAME.fullmatch(name or DEFAULT_GROUP):
        text = f'group_name: must have 1 to 64 letters, digits, "_", "-" and ".", got {name!r:.80}'
        raise InvalidArgument(text, field="group_name")
    return name or DEFAULT_GROUP


def _checked(request: pb.InitWeightsUpdateGroupRequest) -> worker_pb2.JoinWeightsGroup:
    """Returns the join order without its first rank, with defaults for unset fields. Raises InvalidArgument, naming
    the field, for values out of range."""
    address, backend = request.master_address, request.backend or BACKENDS[0]
    if not (0 < len(address) <= MAX_ADDRESS_LENGTH) or not address.isprintable() or " " in address:
        raise InvalidArgument(f"master_address: {address!r:.80} is not a host name or address", field="master_address")
    for name, value, least, most in (
        ("master_port", request.master_port, 1, 65535),
        ("rank_offset", request.rank_offset, 1, MAX_RANKS),
        ("world_size", request.world_size, 2, MAX_RANKS),
        ("timeout_ms", request.timeout_ms, 0, MAX_TIMEOUT_MS),
    ):
        if not least <= value <= most:
            raise InvalidArgument(f"{name}: must be {least} to {most}, got {value}", field=name)
    if backend not in BACKENDS:
        raise InvalidArgument(f"backend: must be {' or '.join(BACKENDS)}, got {backend!r:.40}", field="backend")
    return worker_pb2.JoinWeightsGroup(
        master_address=address,
        master_port=request.master_port,
        world_size=request.world_size,
        group_name=_name(request.group_name),
        backend=backend,
        timeout_ms=request.timeout_ms or DEFAULT_TIMEOUT_MS,
    )
