"""Gated activation of the feed-forward layer."""

from __future__ import annotations

import torch
from torch.nn import functional


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Computes silu(gate) * up: [num_tokens, 2 * size], gate first -> [num_tokens, size] (SwiGLU, arXiv 2002.05202)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
