"""Tolerances of results: the error's norm relative to the exact values', by the dtype they are rounded to."""

from __future__ import annotations

import torch

# Products and sums are in float32; a 16-bit result is rounded once, softmax weights once more.
TOLERANCE = {torch.float32: 3e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the relative error; NaN if either has a NaN."""
    got, want = got.double().cpu(), want.double().cpu()
    assert got.shape == want.shape
    return float((got - want).norm() / want.norm().clamp(min=1e-30))


def assert_close(got: torch.Tensor, want: torch.Tensor, slack: float = 1.0) -> None:
    assert error(got, want) <= slack * TOLERANCE[got.dtype], error(got, want)
