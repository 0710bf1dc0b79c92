"""Tensors over GPU memory that torch has not allocated."""

from __future__ import annotations

import torch
from torch import Tensor


def device_bytes_view(address: int, num_bytes: int, device: torch.device) -> Tensor:
    """Returns a uint8 tensor [num_bytes] over GPU memory without keeping it alive. Torch reads the first bytes' device,
    so they must be mapped."""
    return torch.as_tensor(_Bytes(address, num_bytes), device=device)


class _Bytes:
    """Object that exposes GPU memory by the CUDA array interface, as torch.as_tensor() reads it."""

    def __init__(self, address: int, num_bytes: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
