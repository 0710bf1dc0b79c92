"""What operators want of the device besides steps: other weights."""

from __future__ import annotations

from services.worker.models.weight_folders import WeightFolders
from services.worker.models.weights import Weights, WeightsId
from shared.errors import Unimplemented
from shared.pb.worker.v1 import worker_pb2 as pb


class Orders:
    """Carried out by one rank, as by all the others. Raises QuireError, and then nothing has changed."""

    def __init__(self, weights: Weights, folders: WeightFolders) -> None:
        self.weights, self._folders = weights, folders

    def obey(self, order: pb.DeviceOrder) -> bool:
        """While no step is in flight. Whether blocks hold nothing of use afterwards."""
        kind = order.WhichOneof("order")
        match kind:
            case "stage_weights":
                self.stage_weights(order.stage_weights)
            case "swap_weights":
                self.weights.swap(order.swap_weights.update)
            case "drop_weights":
                self.weights.drop()
            case _:
                raise Unimplemented(f"this worker does not know how to {kind}")
        return kind == "swap_weights" or not self.weights.stages_beside_steps

    def stage_weights(self, order: pb.StageWeights) -> None:
        """On any thread, if weights can be staged beside steps."""
        wanted = order.weights
        found = WeightsId(wanted.update, wanted.version, wanted.path)
        self.weights.stage(self._folders.find(wanted.path), found)


def undoing(order: pb.DeviceOrder) -> pb.DeviceOrder | None:
    """What takes back an order that some ranks have carried out; None if nothing does."""
    if order.WhichOneof("order") == "stage_weights":
        return pb.DeviceOrder(drop_weights=pb.DropWeights())
    return None
