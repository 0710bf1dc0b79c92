"""What operators want of the device besides steps: other weights, and its memory."""

from __future__ import annotations

from pathlib import Path

from services.worker.models.loading.weight_folders import WeightFolders
from services.worker.models.loading.weights import Weights, WeightsId
from services.worker.sleep.sleeper import Sleeper
from shared.errors import Unimplemented
from shared.pb.worker.v1 import worker_pb2 as pb

# Where some ranks have carried out one of these and others have not, it is to be ordered once more.
REPEATABLE = frozenset({"drop_weights", "wake_up"})


class Orders:
    """Carried out by one rank, as by all the others. Raises QuireError, and then nothing has changed."""

    def __init__(self, weights: Weights, folders: WeightFolders, sleeper: Sleeper) -> None:
        self.weights, self._folders, self.sleeper = weights, folders, sleeper

    def obey(self, order: pb.DeviceOrder) -> bool:
        """While no step is in flight. Whether blocks hold nothing of use afterwards."""
        kind = order.WhichOneof("order")
        match kind:
            case "stage_weights":
                self.stage_weights(order.stage_weights)
            case "swap_weights":
                self.sleeper.check_weights()
                self.weights.swap(order.swap_weights.update)
                self.sleeper.end_loan()
            case "drop_weights":
                self.drop_weights()
            case "sleep":
                self.sleeper.sleep(order.sleep.level)
            case "wake_up":
                self.sleeper.wake_up(order.wake_up.tags)
            case _:
                raise Unimplemented(f"this worker does not know how to {kind}")
        return kind in ("swap_weights", "sleep") or not self.weights.stages_beside_steps

    def stage_weights(self, order: pb.StageWeights) -> None:
        """On any thread, if weights can be staged beside steps."""
        self.sleeper.check_weights()
        wanted = order.weights
        folder = Path(order.spooled) if order.spooled else self._folders.find(wanted.path)
        if not self.weights.stages_beside_steps:
            self.sleeper.lend_kv()
        try:
            self.weights.stage(folder, WeightsId(wanted.update, wanted.version, wanted.path, order.spooled))
        except Exception:
            self.drop_weights()
            raise

    def drop_weights(self) -> None:
        """That are staged."""
        self.weights.drop()
        self.sleeper.end_loan()


def undoing(order: pb.DeviceOrder) -> pb.DeviceOrder | None:
    """What takes back an order that some ranks have carried out; None if nothing does."""
    match order.WhichOneof("order"):
        case "stage_weights":
            return pb.DeviceOrder(drop_weights=pb.DropWeights())
        case "sleep":
            return pb.DeviceOrder(wake_up=pb.WakeUp())
    return None
