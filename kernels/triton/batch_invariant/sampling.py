"""Sampling by one kernel with one program per row, for any batch.

The faster variants of quire.kernels.triton.sampling find the same token in exact arithmetic; but they are compiled
separately, and the compiler may fuse products and sums differently, which changes the last bit of a score.
"""

from __future__ import annotations

import torch

from quire.kernels.triton.precompile.shapes import Calls, ModelShape, ints, longs
from quire.kernels.triton.sampling.filtered_sampling import sample_filtered


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Samples one token per row, int32 [num_rows], by the filtered kernel for any arguments; None stands for greedy
    rows or a disabled filter."""

    def column(given: torch.Tensor | None, unused: float, dtype: torch.dtype) -> torch.Tensor:
        if given is not None:
            return given
        return torch.full((logits.size(0),), unused, dtype=dtype, device=logits.device)

    return sample_filtered(
        logits.float(),
        column(temperature, 0.0, torch.float32),
        column(top_k, 0, torch.int32),
        column(top_p, 1.0, torch.float32),
        column(min_p, 0.0, torch.float32),
        seeds,
        positions,
    )


def precompile_calls(shape: ModelShape) -> Calls:
    if shape.batch_invariant and shape.is_whole:
        logits = shape.empty(2, shape.vocab_size)
        yield lambda: sample(logits, None, None, None, None, longs(2), ints(2))
