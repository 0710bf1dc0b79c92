"""MXFP4: 4-bit numbers in groups of 32 with a common scale (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor

GROUP = 32  # numbers per scale
GROUP_BYTES = GROUP // 2
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 magnitudes; the fourth bit is the sign
SCALE_BIAS = 127  # E8M0 exponent bias


def dequantized(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantizes MXFP4 to `dtype` [rows, groups * GROUP].

    blocks: uint8 [rows, groups, GROUP_BYTES], two numbers a byte, low nibble first; scales: uint8 [rows, groups],
    biased powers of two.
    """
    import torch

    values = torch.tensor((*VALUES, *(-value for value in VALUES)), dtype=torch.float32, device=blocks.device)
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(2)  # [rows, groups, GROUP]
    powers = torch.exp2(scales.float() - SCALE_BIAS)
    return (values[halves.int()] * powers.unsqueeze(2)).to(dtype).flatten(1)
