"""Device orders of the scheduler other than steps: updates of weights, and sleep."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from quire.services.worker.host.weight_folders import WeightFolders
from quire.services.worker.models.loading.broadcast.weights_groups import DTYPES, WeightsGroups
from quire.services.worker.models.loading.weights import NewWeights, Weights, WeightsId
from quire.services.worker.replica.component import PlanHook, ReplicaComponent
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.sleep.sleeper import Sleeper
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.plan_violation import PlanViolation
from quire.shared.errors import FailedPrecondition, InvalidArgument, Unimplemented
from quire.shared.pb.common.v1.weights_stream_pb2 import TensorHead
from quire.shared.pb.worker.v1 import worker_pb2 as pb

# Orders that can be repeated if only some ranks executed them.
RETRYABLE = frozenset({"drop_weights", "wake_up", "leave_weights_group"})
# Orders that a worker able to stage during steps executes concurrently with them, in order.
DURING_STEPS = frozenset(
    {"stage_weights", "receive_weights", "drop_weights", "join_weights_group", "leave_weights_group"}
)


class DeviceOrderHandler(ReplicaComponent):
    """Executes device orders on one rank, the same on all ranks. Methods raise QuireError and then change nothing."""

    def __init__(self, weights: Weights, folders: WeightFolders, sleeper: Sleeper, groups: WeightsGroups) -> None:
        self.weights, self._folders, self.sleeper, self._groups = weights, folders, sleeper, groups
        self._broadcast: pb.ExpectedBroadcast | None = None

    @property
    def plan_hooks(self) -> Sequence[PlanHook]:
        """The check that refuses plans, while weights or KV sleep or are released; only an order changes that."""
        return () if self.sleeper.is_awake else (self._check_awake,)

    @property
    def stages_beside_steps(self) -> bool:
        return self.weights.stages_beside_steps

    @property
    def version(self) -> str:
        """Version of the weights of the next step."""
        return self.weights.version

    @property
    def spooled(self) -> str:
        """Folder of streamed weights in use; "" for others. Callable from any thread."""
        return self.weights.id.spooled

    @property
    def weights_name(self) -> str:
        """Name of the current weights, unique per update."""
        return f"{self.weights.id.update} {self.weights.id.version}"

    @property
    def pages_version(self) -> str:
        """Name of the weights that fill the KV pages; while the worker sleeps a name that no weights have, so that
        other workers do not fetch its pages."""
        return self.weights_name if self.sleeper.is_awake else "asleep"

    def update(self, new: NewWeights) -> None:
        """Replaces the weights between two steps."""
        self.weights.update(new)

    def end_epoch(self, report: RetainedState) -> RetainedState:
        """Drops staged weights and adds weights and sleep state to the report."""
        self.drop_weights()
        sleeper = self.sleeper
        return replace(report, weights=self.weights.id, asleep=sleeper.asleep, sleep_level=sleeper.level)

    def _check_awake(self, _plan: StepPlan) -> None:
        """Plan hook: raises PlanViolation while weights or KV sleep or are released."""
        if not self.sleeper.is_awake:
            raise PlanViolation("the worker is asleep")

    def execute_order(self, order: pb.DeviceOrder) -> bool:
        """Executes an order while no step is in flight; orders in DURING_STEPS run on any thread where weights can be
        staged during steps. Returns whether the cached KV has become invalid. Raises QuireError, Unimplemented for
        unknown orders."""
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
                raise Unimplemented(f"this worker does not support the order {kind}")
        return kind in ("swap_weights", "sleep") or not self.weights.stages_beside_steps

    def interrupt(self, order: pb.DeviceOrder) -> None:
        """Makes receiving in a weights group fail if the newly received order leaves the group. Callable from any
        thread."""
        if order.WhichOneof("order") == "leave_weights_group":
            self._groups.interrupt(order.leave_weights_group.group_name)

    def _stage_weights(self, order: pb.StageWeights) -> None:
        """Reads weights from a folder into staging memory, or allocates memory for a broadcast, which
        _receive_weights() fills. Releases the KV for it if both do not fit. An error drops what was staged and is
        raised."""
        self.sleeper.check_weights()
        wanted, broadcast = order.weights, order.broadcast if order.HasField("broadcast") else None
        changed = wanted.encoder_update if broadcast is None else self.weights.id.encoder_update
        staged_id = WeightsId(
            wanted.update,
            wanted.version,
            wanted.path,
            order.spooled,
            is_kept=broadcast is None,
            encoder_update=changed,
        )
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
        """Receives the broadcast that was staged. An error drops the staged weights and is raised; FailedPrecondition
        if none was staged."""
        if self._broadcast is None:
            raise FailedPrecondition("no weights are expected: stage their description first")
        try:
            with self._groups.receiving(self._broadcast) as tensors:
                self.weights.receive(tensors, update)
        except Exception:
            self.drop_weights()
            raise

    def drop_weights(self) -> None:
        """Drops staged or expected weights and restores KV memory that was released for them."""
        self._broadcast = None
        self.weights.discard_staged()
        self.sleeper.restore_kv()

    def _sleep(self, level: int) -> None:
        """Puts weights and KV to sleep. Raises FailedPrecondition for level 2 if the weights were broadcast, as they
        cannot be read again."""
        if level > 1 and not self.weights.id.is_kept:
            text = (
                "level: the weights were broadcast by a trainer and cannot be read again: use level 1, which keeps them"
            )
            raise FailedPrecondition(text, field="level")
        self.sleeper.sleep(level)


class NoDeviceOrders(ReplicaComponent):
    """Orders of a model other than a decoder, whose weights neither change nor sleep."""

    stages_beside_steps = True
    version = spooled = weights_name = pages_version = ""

    def execute_order(self, order: pb.DeviceOrder) -> bool:
        """Raises FailedPrecondition for every order."""
        raise FailedPrecondition(
            "the weights of this worker cannot be changed or put to sleep: its model is not a decoder"
        )

    def update(self, new: NewWeights) -> None:
        """Raises FailedPrecondition for every update."""
        raise FailedPrecondition("the weights of this worker cannot be changed: its model is not a decoder")

    def interrupt(self, order: pb.DeviceOrder) -> None:
        """No-op: no order waits."""

    def drop_weights(self) -> None:
        """No-op: no weights are staged."""


def _meta_tensors(heads: Iterable[TensorHead]) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, meta tensor) of the tensors to be broadcast, to check names, shapes and dtypes. Raises
    InvalidArgument for unsupported dtypes."""
    for head in heads:
        if head.dtype not in DTYPES:
            text = f"dtypes: {head.name}: {head.dtype} cannot be broadcast; supported: {', '.join(DTYPES)}"
            raise InvalidArgument(text, field="dtypes")
        yield head.name, torch.empty(tuple(head.shape), dtype=DTYPES[head.dtype], device="meta")


def compensating_order(order: pb.DeviceOrder) -> pb.DeviceOrder | None:
    """Returns the order that reverts one that only some ranks executed; None if none can."""
    match order.WhichOneof("order"):
        case "stage_weights" | "receive_weights":
            return pb.DeviceOrder(drop_weights=pb.DropWeights())
        case "join_weights_group":
            name = order.join_weights_group.group_name
            return pb.DeviceOrder(leave_weights_group=pb.LeaveWeightsGroup(group_name=name))
        case "sleep":
            return pb.DeviceOrder(wake_up=pb.WakeUp())
    return None
