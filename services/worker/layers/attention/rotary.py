"""Rotary tables (arXiv 2104.09864) and their extensions to longer contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.models.config.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """Returns the rotary table: cosines, then sines, of every position's angles, float32 [num_positions, head_dim], on
    the CPU.

    Pairs beyond the rotated fraction have angle 0; YaRN's and LongRoPE's attention factor is included. LongRoPE uses
    its long factors if `num_positions` exceeds the original context.
    """
    import torch  # lazy: families are also read without torch

    rotated = int(head_dim * rope.share)
    if rope.kind == "longrope":
        frequencies = _longrope(rope, rotated, beyond=num_positions > rope.original_max_positions)
    else:
        frequencies = FREQUENCIES[rope.kind](rope, rotated)
    still = torch.zeros((head_dim - rotated) // 2)  # pairs without rotation
    frequencies = torch.cat((frequencies, still))
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    size = torch.where(torch.arange(head_dim // 2) < rotated // 2, rope.attention_factor, 1.0)
    return torch.cat((angles.cos() * size, angles.sin() * size), dim=1)


def row_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Returns the permutation of a head's elements that puts each pair at the same index of both halves.

    int64 [head_dim]; None if the checkpoint has this order already.
    """
    import torch

    rotated = int(head_dim * rope.share)
    if rotated == head_dim and not rope.interleaved:
        return None
    pairs = torch.arange(rotated).view(-1, 2).t() if rope.interleaved else torch.arange(rotated).view(2, -1)
    still = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()


def column_axes(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Returns for each column of the rotary table whether it turns by time (0), row (1) or column (2) of a picture.

    int64 [head_dim]; None if all turn by one position.
    """
    import torch

    if not rope.sections:
        return None
    pairs = torch.arange(head_dim // 2)
    if not rope.sections_alternate:
        return torch.arange(3).repeat_interleave(torch.tensor(rope.sections)).repeat(2)
    ends = 3 * torch.tensor(rope.sections)
    axes = pairs % 3
    return torch.where(pairs < ends[axes], axes, 0).repeat(2)


def rows_by_axes(table: Tensor, axes: Tensor, of_columns: Tensor) -> Tensor:
    """Returns the rotary rows of tokens in pictures, float32 [num_tokens, head_dim].

    `table`: rotary table; `axes`: int32 [3, num_tokens] positions by time, row and column; `of_columns`:
    column_axes().
    """
    return table.gather(0, axes.index_select(0, of_columns).t().long())


def _plain(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair, in radians, [head_dim / 2]."""
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / rope.theta**exponents


def _linear(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair, in radians, [head_dim / 2], by position interpolation (arXiv
    2306.15595): all are divided by the same factor."""
    return _plain(rope, head_dim) / rope.factor


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair, in radians, [head_dim / 2], by Llama 3.1's scaling: low frequencies
    are divided by the factor, high ones kept, those between interpolated."""
    import torch

    plain = _plain(rope, head_dim)
    turns = rope.original_max_positions * plain / (2 * math.pi)  # turns of each pair over the original context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, kept.clamp(0, 1))


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns the angle per position of each pair, in radians, [head_dim / 2], by YaRN's NTK by parts (arXiv
    2309.00071, section 3.2): fast pairs are kept, slow ones divided by the factor, those between interpolated."""
    import torch

    plain = _plain(rope, head_dim)

    def pair_with(turns: float) -> float:
        """Returns the index of the pair with this number of turns over the original context."""
        wave = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def _none(_rope: RopeConfig, head_dim: int) -> Tensor:
    """Returns zeros: no pair is rotated."""
    import torch

    return torch.zeros(head_dim // 2)


def _longrope(rope: RopeConfig, head_dim: int, *, beyond: bool) -> Tensor:
    """Returns the angle per position of each pair, in radians, [head_dim / 2], by LongRoPE (arXiv 2402.13753): each
    is divided by a factor of its own.

    `beyond`: whether sequences may exceed the original context; then all use the long factors, otherwise the short
    ones.
    """
    import torch

    return _plain(rope, head_dim) / torch.tensor(rope.long_factors if beyond else rope.short_factors)


FREQUENCIES = {"none": _none, "default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
