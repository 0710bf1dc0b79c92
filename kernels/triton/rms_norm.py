"""Root mean square normalization with one row per program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape


@dataclass(frozen=True)
class NormTuning:
    """Warps of a normalization by the width of a row."""

    warp_elements: int  # minimum elements of a row per warp
    most_warps: int


# 16 bytes of a 16-bit row per thread and load; more warps only wait for each other.
TUNING = ByCapability({SM90: NormTuning(warp_elements=256, most_warps=16)})


@triton.jit
def _rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, eps, size, WIDTH: tl.constexpr, ADD: tl.constexpr):
    """Normalizes one row by its RMS, times weight. ADD: adds the residual first and stores the sum in its place."""
    row = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, WIDTH)
    inside = at < size
    x = tl.load(x_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row + at, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(residual_ptr.dtype.element_ty)
        tl.store(residual_ptr + row + at, rounded, mask=inside)
        x = rounded.to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / size + eps)
    tl.store(out_ptr + row + at, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes x / sqrt(mean(x²) + eps) * weight over the last dimension, in x's dtype."""
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Adds `x` to `residual` (contiguous) in place and returns the RMS norm of the sum; both [num_tokens, size]."""
    assert residual.is_contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    """Launches the norm of all rows into `out`; a `residual` is updated in place first."""
    size = weight.size(0)
    width = triton.next_power_of_2(size)
    rows = x.numel() // size
    if rows:
        warps = min(max(width // TUNING.here.warp_elements, 1), TUNING.here.most_warps)
        _rms_norm[(rows,)](x, residual, weight, out, eps, size, WIDTH=width, ADD=residual is not None, num_warps=warps)


def precompile_calls(shape: ModelShape) -> Calls:
    x, weight = shape.empty(ROWS, shape.hidden_size), shape.empty(shape.hidden_size)
    yield lambda: rms_norm(x, weight, 1e-6)
    yield lambda: add_rms_norm(x, x, weight, 1e-6)
