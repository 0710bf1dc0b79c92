"""Root mean square normalisation, one row a program."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm(x_ptr, residual_ptr, weight_ptr, out_ptr, eps, size, WIDTH: tl.constexpr, ADD: tl.constexpr):
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
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, None, weight, out, eps)
    return out


def add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    assert residual.is_contiguous()
    x = x.contiguous()
    out = torch.empty_like(x)
    _launch(x, residual, weight, out, eps)
    return out


def _launch(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, out: torch.Tensor, eps: float
) -> None:
    size = weight.size(0)
    width = triton.next_power_of_2(size)
    rows = x.numel() // size
    if rows:
        # 16 bytes of a 16-bit row a thread and load; more warps only wait for each other.
        warps = min(max(width // 256, 1), 16)
        _rms_norm[(rows,)](x, residual, weight, out, eps, size, WIDTH=width, ADD=residual is not None, num_warps=warps)
