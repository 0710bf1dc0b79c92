"""Tolerances of results, in terms of the dtype they are rounded to."""

from __future__ import annotations

import torch

from quire.kernels import cpu

UNIT = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8}  # a unit in the last place of 1.0

needs_library = {"condition": cpu.unavailable() is not None, "reason": str(cpu.unavailable())}


def assert_close(got: torch.Tensor, want: torch.Tensor, units: float = 1.0, absolute: float | None = None) -> None:
    """Asserts that values differ by at most `units` last places plus `absolute` (default: the same of the mean
    magnitude)."""
    assert got.dtype is want.dtype or want.dtype is torch.float64
    assert got.shape == want.shape
    unit = UNIT[got.dtype] * units
    got, want = got.double(), want.double()
    allowed = unit * want.abs() + (unit * want.abs().mean() if absolute is None else absolute)
    wrong = ~((got - want).abs() <= allowed)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, worst {(got - want).abs().max():.3e}"
