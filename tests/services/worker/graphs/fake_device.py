"""CPU device that behaves as if it had separate memory, for testing graphs without a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from quire.services.worker.device.device import Device
from quire.services.worker.device.staging import Array, InPlaceStaging


class AsynchronousCpu(Device):
    """CPU device that reports separate memory to the runner."""

    @property
    def is_synchronous(self) -> bool:
        return False


class Copying(InPlaceStaging):
    """Staging that copies arrays as if to another memory, with the dtypes in which they arrive there."""

    def upload(self, arrays: list[Array]) -> list[torch.Tensor]:
        return super().upload([array.astype(np.int32) for array in arrays])

    def download(self, tensors: list[torch.Tensor]) -> Any:
        return super().download([tensor.clone() for tensor in tensors])
