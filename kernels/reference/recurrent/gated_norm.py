"""RMS norm of each head, followed by a gate."""

from __future__ import annotations

import torch
from torch.nn import functional

from quire.kernels.reference.rms_norm import rms_norm


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes rms_norm(x) * silu(gate), [num_tokens, num_heads * size] in x's dtype.

    x: [num_tokens, num_heads, size]; gate: [num_tokens, num_heads * size], elements of a token contiguous; weight:
    [size].
    """
    normed = rms_norm(x, weight, eps).flatten(1)
    return (normed * functional.silu(gate.float())).to(x.dtype)
