"""Normalization of 8-bit pixels on the device."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quire.shared.media.processor import Normalization


def normalize(pixels: torch.Tensor, normalization: Normalization, dtype: torch.dtype) -> torch.Tensor:
    """Returns (pixel * factor - mean) / std, computed in float32: uint8 [n, height, width, 3] -> [n, 3, height, width]
    in `dtype`."""
    mean, std = _on_device(normalization.mean, pixels.device), _on_device(normalization.std, pixels.device)
    values = (pixels.float() * normalization.factor - mean) / std
    return values.to(dtype).permute(0, 3, 1, 2).contiguous()


@lru_cache(maxsize=16)
def _on_device(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    """Returns numbers as a tensor; kept, because a copy to the device may wait for what it computes."""
    import torch

    return torch.tensor(values, device=device)
