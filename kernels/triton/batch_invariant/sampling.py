"""Sampling by one kernel with one program per row, for any batch.

The faster variants of quire.kernels.triton.sampling find the same token in exact arithmetic; but they are compiled
separately, and the compiler may fuse products and sums differently, which changes the last bit of a score.
"""

from __future__ import annotations

import torch

from quire.kernels.reference.sampling.sampling import UNUSED
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, ints, longs
from quire.kernels.triton.sampling.filtered_sampling import sample_filtered


def sample(logits: torch.Tensor, *columns: torch.Tensor | None) -> torch.Tensor:
    """Samples one token per row, int32 [num_rows], by the filtered kernel for any arguments. `columns`: temperature,
    filters, seeds and positions in the reference's order; None stands for greedy rows or a disabled filter."""
    *given, seeds, positions = columns
    used = [
        torch.full((logits.size(0),), unused, dtype=dtype, device=logits.device) if column is None else column
        for column, (unused, dtype) in zip(given, UNUSED, strict=True)
    ]
    return sample_filtered(logits.float(), *used, seeds, positions)


def precompile_calls(shape: ModelShape) -> Calls:
    if shape.batch_invariant and shape.is_whole:
        logits = shape.empty(2, shape.vocab_size)
        yield lambda: sample(logits, None, None, None, None, longs(2), ints(2))
