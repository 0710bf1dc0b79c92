"""Quantizes activations to 8 bits, int8 or float8_e4m3fn, with a scale per token or per group of its elements."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.reference.quantized_linear import LARGEST, LEAST_SCALE, QuantizedActivations

TO_INTEGER = 12582912.0  # 1.5 * 2^23: adding it to a float32 rounds to an integer
ELEMENTS = 2048  # elements per program for tokens with small groups


@triton.jit
def _quantize(
    x_ptr,
    given_ptr,
    out_ptr,
    scales_ptr,
    size,
    tokens,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROUND: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """Quantizes GROUPS groups of a token, WIDTH elements per scale; scales [groups, tokens]."""
    token = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    source = token.to(tl.int64) * size + at
    x = tl.load(x_ptr + source, mask=at < size, other=0.0).to(tl.float32)
    if given_ptr is not None:
        scales = tl.zeros([GROUPS], tl.float32) + tl.load(given_ptr)
    else:
        scales = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, LEAST)
    tl.store(scales_ptr + group * tokens + token, scales, mask=group * WIDTH < size)
    codes = tl.minimum(tl.maximum(x / scales[:, None], -LARGEST), LARGEST)
    if ROUND:
        codes = (codes + MAGIC) - MAGIC
    tl.store(out_ptr + source, codes.to(out_ptr.dtype.element_ty), mask=at < size)


def quantize(x: torch.Tensor, wanted: QuantizedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes x [num_tokens, in_features] to codes of that shape and float32 scales [groups, num_tokens]."""
    tokens, size = x.shape
    width = wanted.group_size or triton.next_power_of_2(size)
    together = min(max(ELEMENTS // width, 1), triton.next_power_of_2(triton.cdiv(size, width)))
    groups = triton.cdiv(size, width)
    codes = torch.empty((tokens, size), dtype=wanted.dtype, device=x.device)
    scales = torch.empty((groups, tokens), dtype=torch.float32, device=x.device)
    elements = width * together
    _quantize[(tokens, triton.cdiv(groups, together))](
        x,
        wanted.scale,
        codes,
        scales,
        size,
        tokens,
        GROUPS=together,
        WIDTH=width,
        LARGEST=LARGEST[wanted.dtype],
        LEAST=LEAST_SCALE,
        ROUND=wanted.dtype is torch.int8,
        MAGIC=TO_INTEGER,
        num_warps=8 if elements > 4096 else 4 if elements > 512 else 1,
    )
    return codes, scales
