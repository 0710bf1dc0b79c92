"""Device orders of an encode worker: updates of the encoder's weights from folders."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.services.worker.host.weight_folders import WeightFolders
from quire.services.worker.models.loading.weights import WeightsId, copy_encoder, load_encoder
from quire.services.worker.replica.device_orders import NoDeviceOrders
from quire.services.worker.replica.retained_state import RetainedState
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.models.model_identity import read_config
from quire.shared.pb.worker.v1 import worker_pb2 as pb

if TYPE_CHECKING:
    from quire.services.worker.models.vision.port import MediaEncoder

OF_ENCODER = ("model_type", "vision_config", "audio_config")  # fields of config.json that determine an encoder


class EncoderOrders(NoDeviceOrders):
    """Owner of an encode worker's weights. A folder without tensors of the encoder, as a trainer of the text model
    writes it, leaves the encoder as it is."""

    stages_beside_steps = False

    def __init__(
        self,
        encoder: MediaEncoder,
        new_encoder: Callable[[], MediaEncoder | None],
        folders: WeightFolders,
        folder: Path,
    ) -> None:
        """`new_encoder`: makes another one of the same structure, without weights; `folder`: the model served."""
        self._encoder, self._new, self._folders, self._served = encoder, new_encoder, folders, folder
        self._staged: tuple[WeightsId, MediaEncoder | None] | None = None
        self.id = WeightsId()

    def execute_order(self, order: pb.DeviceOrder) -> bool:
        """Executes an order while nothing is being encoded; returns False, since there is no KV. Raises
        FailedPrecondition for other orders than updates, and the errors of loading."""
        match order.WhichOneof("order"):
            case "stage_weights":
                self._stage(order.stage_weights)
            case "swap_weights":
                self._swap(order.swap_weights.update)
            case "drop_weights":
                self.drop_weights()
            case _:
                return super().execute_order(order)
        return False

    def drop_weights(self) -> None:
        """Drops staged weights."""
        self._staged = None

    def end_epoch(self, report: RetainedState) -> RetainedState:
        """Drops staged weights and adds the weights in use to the report."""
        self.drop_weights()
        return replace(report, weights=self.id)

    def _stage(self, order: pb.StageWeights) -> None:
        """Loads the encoder of the update's folder. Raises InvalidArgument for another model."""
        self.drop_weights()
        if order.stream_id:
            raise FailedPrecondition("weights: an encode worker reads them from folders, not from streams")
        wanted, folder = order.weights, self._folders.find(order.weights.path)
        theirs, ours = _encoder_values(folder), _encoder_values(self._served)
        for name in OF_ENCODER:
            if theirs[name] != ours[name]:
                text = f"its {name} differs from that of the model served"
                raise InvalidArgument(f"model: {folder} is another model: {text}", field="model")
        staged_id = WeightsId(wanted.update, wanted.version, wanted.path, encoder_update=wanted.encoder_update)
        self._staged = staged_id, load_encoder(folder, self._new)

    def _swap(self, update: int) -> None:
        """Copies the staged encoder over the current one. Raises FailedPrecondition if this update is not staged."""
        staged, self._staged = self._staged, None
        if staged is None or staged[0].update != update:
            raise FailedPrecondition(f"no weights are staged as update {update}")
        self.id, fresh = staged
        if fresh is not None:
            copy_encoder(self._encoder, fresh)


def _encoder_values(folder: Path) -> dict[str, Any]:
    """Returns the fields of config.json that determine the encoder. Raises InvalidArgument for an unreadable file."""
    read_config(folder)  # checks the file
    values = json.loads((folder / "config.json").read_text())
    return {name: values.get(name) for name in OF_ENCODER}
