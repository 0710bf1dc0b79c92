"""Rotary positions as a table (arXiv 2104.09864) and the ways to stretch them over longer contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.models.config.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines, of every position's angles. On the CPU."""
    import torch  # here: families are also read where there is none

    rotated = int(head_dim * rope.share)
    if rope.kind == "longrope":
        frequencies = _longrope(rope, rotated, beyond=num_positions > rope.original_max_positions)
    else:
        frequencies = FREQUENCIES[rope.kind](rope, rotated)
    still = torch.zeros((head_dim - rotated) // 2)  # pairs that keep their place
    frequencies = torch.cat((frequencies, still))
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    size = torch.where(torch.arange(head_dim // 2) < rotated // 2, rope.attention_factor, 1.0)
    return torch.cat((angles.cos() * size, angles.sin() * size), dim=1)


def row_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Which element of a head, as the checkpoint has it, comes at each place, so that every pair is an element of the
    first half and the same of the second; None: they are like that. int64 [head_dim]"""
    import torch

    rotated = int(head_dim * rope.share)
    if rotated == head_dim and not rope.interleaved:
        return None
    pairs = torch.arange(rotated).view(-1, 2).t() if rope.interleaved else torch.arange(rotated).view(2, -1)
    still = torch.arange(rotated, head_dim).view(2, -1)
    return torch.cat((pairs, still), dim=1).flatten()


def _plain(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2] angle per position of each pair."""
    import torch

    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / rope.theta**exponents


def _linear(rope: RopeConfig, head_dim: int) -> Tensor:
    """Position interpolation (arXiv 2306.15595)."""
    return _plain(rope, head_dim) / rope.factor


def _llama3(rope: RopeConfig, head_dim: int) -> Tensor:
    """Llama 3.1: long waves are slowed, short ones kept, those between blended by their turns in the old context."""
    import torch

    plain = _plain(rope, head_dim)
    turns = rope.original_max_positions * plain / (2 * math.pi)  # of each pair over the old context
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    return torch.lerp(plain / rope.factor, plain, kept.clamp(0, 1))


def _yarn(rope: RopeConfig, head_dim: int) -> Tensor:
    """NTK by parts (arXiv 2309.00071, section 3.2)."""
    import torch

    plain = _plain(rope, head_dim)

    def pair_with(turns: float) -> float:
        """Index of the pair that turns so often over the old context."""
        wave = rope.original_max_positions / (turns * 2 * math.pi)
        return head_dim * math.log(wave) / (2 * math.log(rope.theta))

    low, high = pair_with(rope.beta_fast), pair_with(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    return torch.lerp(plain, plain / rope.factor, ramp.clamp(0, 1))


def _none(_rope: RopeConfig, head_dim: int) -> Tensor:
    import torch

    return torch.zeros(head_dim // 2)


def _longrope(rope: RopeConfig, head_dim: int, *, beyond: bool) -> Tensor:
    """`beyond`: sequences may be longer than the old context; then all are stretched as the longest are."""
    import torch

    return _plain(rope, head_dim) / torch.tensor(rope.long_factors if beyond else rope.short_factors)


FREQUENCIES = {"none": _none, "default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
