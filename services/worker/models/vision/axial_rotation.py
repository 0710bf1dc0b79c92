"""Rotary positions of a grid of patches: half of each head by column, half by row."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def angles_of_grid(side: int, head_dim: int, theta: float) -> Tensor:
    """Returns the angle of each pair of a head's elements, in radians, float32 [side ** 2 + 1, head_dim / 2], for the
    patches of a square grid, row after row, and a class token after them, which is not rotated. The first half of the
    pairs turns by the column, the second by the row, both counted from 1."""
    import torch

    width = head_dim // 2
    frequencies = 1.0 / theta ** (torch.arange(0, width, 2)[: width // 2].float() / width)
    steps = torch.arange(1, side + 1)[:, None] * frequencies  # [side, width / 2]
    columns, rows = steps.repeat(side, 1), steps.repeat_interleave(side, dim=0)
    patches = torch.cat((columns, rows), dim=-1)
    return torch.cat((patches, torch.zeros(1, patches.size(1))))


def rotate_pairs(x: Tensor, angles: Tensor) -> Tensor:
    """Rotates neighbouring elements of each head as pairs, computed in float32: x [num_tokens, num_heads, head_dim],
    angles [num_tokens, head_dim / 2] -> the shape and dtype of x."""
    import torch

    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2).to(x.dtype)
