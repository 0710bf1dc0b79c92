"""A CPU that stands for a device with memory of its own: graphs are tested without one."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.services.worker.device.device import Device
from quire.services.worker.device.staging import Array, InPlaceStaging


class AsynchronousCpu(Device):
    """A CPU of which the runner thinks that it has memory of its own."""

    @property
    def is_synchronous(self) -> bool:
        return False


class Copying(InPlaceStaging):
    """Arrays are copied where they are, as if they had to go to another memory, and arrive as they do there."""

    def upload(self, arrays: list[Array]) -> list[torch.Tensor]:
        return super().upload([array.astype(np.int32) for array in arrays])

    def download(self, tensors: list[torch.Tensor]) -> Any:
        return super().download([tensor.clone() for tensor in tensors])
