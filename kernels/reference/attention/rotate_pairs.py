"""Rotation of heads by the angles of their positions."""

from __future__ import annotations

import torch


def rotate_pairs(heads: torch.Tensor, cos_sin: torch.Tensor) -> None:
    """Rotates heads in place. A pair is at the same index of both halves of a head.

    heads: [num_tokens, ..., num_heads, head_dim] in one float dtype, heads of a token at equal distances
    cos_sin: float32 [num_tokens, head_dim], cosines of each token's angles, then sines
    """
    cos, sin = (part.view(part.size(0), *(1,) * (heads.dim() - 2), part.size(1)) for part in cos_sin.chunk(2, dim=1))
    first, second = heads.float().chunk(2, dim=-1)
    heads.copy_(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
