"""What operators want of the device besides steps: other weights, and its memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.services.worker.models.loading.broadcast.weights_groups import DTYPES, WeightsGroups
from quire.services.worker.models.loading.weight_folders import WeightFolders
from quire.services.worker.models.loading.weights import NewWeights, Weights, WeightsId
from quire.services.worker.replica.component import ReplicaComponent
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.sleep.sleeper import Sleeper
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared.errors import FailedPrecondition, InvalidArgument, Unimplemented
from quire.shared.pb.common.v1.weights_stream_pb2 import TensorHead
from quire.shared.pb.worker.v1 import worker_pb2 as pb

# Where some ranks have carried out one of these and others have not, it is to be ordered once more.
RETRYABLE = frozenset({"drop_weights", "wake_up", "leave_weights_group"})
# Those that a worker which stages beside its steps carries out beside them, and in their order.
DURING_STEPS = frozenset(
    {"stage_weights", "receive_weights", "drop_weights", "join_weights_group", "leave_weights_group"}
)


class DeviceOrderHandler(ReplicaComponent):
    """Carried out by one rank, as by all the others. Raises QuireError, and then nothing has changed."""

    def __init__(self, weights: Weights, folders: WeightFolders, sleeper: Sleeper, groups: WeightsGroups) -> None:
        self.weights, self._folders, self.sleeper, self._groups = weights, folders, sleeper, groups
        self._broadcast: pb.ExpectedBroadcast | None = None
        self.plan_hooks = (self._check_awake,)

    @property
    def stages_beside_steps(self) -> bool:
        return self.weights.stages_beside_steps

    @property
    def version(self) -> str:
        """Of the weights that the next step is computed with."""
        return self.weights.version

    @property
    def spooled(self) -> str:
        """The folder of weights that came as a stream; empty for others. Any thread may ask."""
        return self.weights.id.spooled

    @property
    def weights_name(self) -> str:
        """A name that no two updates share."""
        return f"{self.weights.id.update} {self.weights.id.version}"

    @property
    def pages_version(self) -> str:
        """The name of the weights that fill KV pages; one that no weights have while the worker sleeps, so that other
        workers read none of its pages."""
        return self.weights_name if self.sleeper.is_awake else "asleep"

    def update(self, new: NewWeights) -> None:
        """Between two steps."""
        self.weights.update(new)

    def end_epoch(self, report: RetainedState) -> RetainedState:
        self.drop_weights()
        sleeper = self.sleeper
        return replace(report, weights=self.weights.id, asleep=sleeper.asleep, sleep_level=sleeper.level)

    def _check_awake(self, _plan: StepPlan) -> None:
        if not self.sleeper.is_awake:
            raise PlanViolation("the worker is asleep")

    def execute_order(self, order: pb.DeviceOrder) -> bool:
        """While no step is in flight, but for those of DURING_STEPS where weights can be staged beside steps: these on
        any thread. Whether blocks hold nothing of use afterwards."""
        kind = order.WhichOneof("order")
        match kind:
            case "stage_weights":
                self._stage_weights(order.stage_weights)
            case "receive_weights":
                self._receive_weights(order.receive_weights.update)
            case "join_weights_group":
                self.weights.check_updatable()
                self._groups.join(order.join_weights_group)
                return False
            case "leave_weights_group":
                self._groups.leave(order.leave_weights_group.group_name)
                return False
            case "swap_weights":
                self.sleeper.check_weights()
                self.weights.swap(order.swap_weights.update)
                self.sleeper.restore_kv()
            case "drop_weights":
                self.drop_weights()
            case "sleep":
                self._sleep(order.sleep.level)
            case "wake_up":
                self.sleeper.wake_up(order.wake_up.tags)
            case _:
                raise Unimplemented(f"this worker does not know how to {kind}")
        return kind in ("swap_weights", "sleep") or not self.weights.stages_beside_steps

    def interrupt(self, order: pb.DeviceOrder) -> None:
        """What has just come ends the wait for what does not come any more. Any thread may call."""
        if order.WhichOneof("order") == "leave_weights_group":
            self._groups.interrupt(order.leave_weights_group.group_name)

    def _stage_weights(self, order: pb.StageWeights) -> None:
        self.sleeper.check_weights()
        wanted, broadcast = order.weights, order.broadcast if order.HasField("broadcast") else None
        staged_id = WeightsId(wanted.update, wanted.version, wanted.path, order.spooled, is_kept=broadcast is None)
        if broadcast is not None:
            self._groups.find(broadcast.content.group_name)
            tensors = [*_meta_tensors(broadcast.tensors)]
        else:
            folder = Path(order.spooled) if order.spooled else self._folders.find(wanted.path)
        if not self.weights.stages_beside_steps:
            self.sleeper.release_kv_for_staging()
        try:
            if broadcast is not None:
                self.weights.preallocate(tensors, staged_id)
            else:
                self.weights.stage(folder, staged_id)
        except Exception:
            self.drop_weights()
            raise
        self._broadcast = broadcast

    def _receive_weights(self, update: int) -> None:
        if self._broadcast is None:
            raise FailedPrecondition("no weights are expected")
        try:
            with self._groups.receiving(self._broadcast) as tensors:
                self.weights.receive(tensors, update)
        except Exception:
            self.drop_weights()
            raise

    def drop_weights(self) -> None:
        """That are staged or expected."""
        self._broadcast = None
        self.weights.discard_staged()
        self.sleeper.restore_kv()

    def _sleep(self, level: int) -> None:
        if level > 1 and not self.weights.id.is_kept:
            text = "level: the weights were broadcast by a trainer, and could not be read again: level 1 keeps them"
            raise FailedPrecondition(text, field="level")
        self.sleeper.sleep(level)


class NoDeviceOrders(ReplicaComponent):
    """Those of a model that is no decoder: its weights neither change nor sleep."""

    stages_beside_steps = True
    version = spooled = weights_name = pages_version = ""

    def execute_order(self, order: pb.DeviceOrder) -> bool:
        """Raises FailedPrecondition."""
        raise FailedPrecondition("the weights of this worker neither change nor sleep: its model is no decoder")

    def update(self, new: NewWeights) -> None:
        """Raises FailedPrecondition."""
        raise FailedPrecondition("the weights of this worker cannot be changed: its model is no decoder")

    def interrupt(self, order: pb.DeviceOrder) -> None:
        """No order waits."""

    def drop_weights(self) -> None:
        """None are staged."""


def _meta_tensors(heads: Iterable[TensorHead]) -> Iterator[tuple[str, Tensor]]:
    """What their names, shapes and dtypes can be checked with."""
    for head in heads:
        if head.dtype not in DTYPES:
            text = f"dtypes: {head.name}: {head.dtype} is broadcast by nobody, but {', '.join(DTYPES)}"
            raise InvalidArgument(text, field="dtypes")
        yield head.name, torch.empty(tuple(head.shape), dtype=DTYPES[head.dtype], device="meta")


def compensating_order(order: pb.DeviceOrder) -> pb.DeviceOrder | None:
    """What takes back an order that some ranks have carried out; None if nothing does."""
    match order.WhichOneof("order"):
        case "stage_weights" | "receive_weights":
            return pb.DeviceOrder(drop_weights=pb.DropWeights())
        case "join_weights_group":
            name = order.join_weights_group.group_name
            return pb.DeviceOrder(leave_weights_group=pb.LeaveWeightsGroup(group_name=name))
        case "sleep":
            return pb.DeviceOrder(wake_up=pb.WakeUp())
    return None
