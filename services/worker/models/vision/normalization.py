"""Normalization of 8-bit pixels on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from quire.shared.media.processor import Normalization


def normalize(pixels: torch.Tensor, normalization: Normalization, dtype: torch.dtype) -> torch.Tensor:
    """Returns (pixel * factor - mean) / std, computed in float32: uint8 [n, height, width, 3] -> [n, 3, height, width]
    in `dtype`."""
    import torch

    mean = torch.tensor(normalization.mean, device=pixels.device)
    std = torch.tensor(normalization.std, device=pixels.device)
    values = (pixels.float() * normalization.factor - mean) / std
    return values.to(dtype).permute(0, 3, 1, 2).contiguous()
