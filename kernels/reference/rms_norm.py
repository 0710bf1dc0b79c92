"""Root mean square normalization (arXiv 1910.07467)."""

from __future__ import annotations

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes x / sqrt(mean(x²) + eps) * weight over the last dimension, in x's dtype; the mean is in float32.

    x: [..., size], weight: [size].
    """
    wide = x.float()
    norm = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)  # does not materialize the squares
    scale = norm.square_().div_(x.size(-1)).add_(eps).rsqrt_()
    return (wide * scale).to(x.dtype).mul_(weight)


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds x to `residual` in place (rounded to its dtype) and returns rms_norm of the sum. Both [num_tokens, size]."""
    residual.add_(x)
    return rms_norm(residual, weight, eps)
