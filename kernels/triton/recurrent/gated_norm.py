"""RMS norm and gate of some heads of one token per program."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability


@dataclass(frozen=True)
class GatedNormTuning:
    """Heads of a token per program."""

    heads: int  # per program


TUNING = ByCapability({SM90: GatedNormTuning(heads=8)})


@triton.jit
def _gated_norm(
    x_ptr,
    gate_ptr,
    gate_stride,
    weight_ptr,
    out_ptr,
    eps,
    num_heads,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    HEADS: tl.constexpr,
):
    """Normalizes HEADS heads of one token by their RMS, times weight and silu(gate)."""
    token = tl.program_id(0).to(tl.int64)
    heads, at = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, WIDTH)
    inside = (heads < num_heads)[:, None] & (at < SIZE)[None, :]
    places = heads[:, None] * SIZE + at[None, :]
    x = tl.load(x_ptr + token * num_heads * SIZE + places, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + token * gate_stride + places, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + at, mask=at < SIZE, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)
    normed = (x * scale[:, None]).to(out_ptr.dtype.element_ty).to(tl.float32) * weight[None, :]
    found = normed * (gate * tl.sigmoid(gate))
    tl.store(out_ptr + token * num_heads * SIZE + places, found.to(out_ptr.dtype.element_ty), mask=inside)


def gated_norm(x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """Computes rms_norm(x) * silu(gate): contiguous [num_tokens, num_heads, size] -> [num_tokens, num_heads * size]."""
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    num_tokens, num_heads, size = x.shape
    out = torch.empty((num_tokens, num_heads * size), dtype=x.dtype, device=x.device)
    if num_tokens:
        heads = min(TUNING.here.heads, triton.next_power_of_2(num_heads))
        _gated_norm[(num_tokens, triton.cdiv(num_heads, heads))](
            x,
            gate,
            gate.stride(0),
            weight,
            out,
            eps,
            num_heads,
            SIZE=size,
            WIDTH=triton.next_power_of_2(size),
            HEADS=heads,
        )
    return out
