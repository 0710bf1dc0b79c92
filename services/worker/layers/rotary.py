"""Rotary positions as a table (arXiv 2104.09864) and the ways to stretch them over longer contexts."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.models.rope_config import RopeConfig


def cos_sin_table(rope: RopeConfig, head_dim: int, num_positions: int) -> Tensor:
    """float32 [num_positions, head_dim]: cosines, then sines, of every position's angles. On the CPU."""
    import torch  # here: families are also read where there is none

    frequencies = FREQUENCIES[rope.kind](rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32).unsqueeze(1) * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1) * rope.attention_factor


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


FREQUENCIES = {"default": _plain, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
