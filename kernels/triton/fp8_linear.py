"""Matrix products in 8-bit floats: kernels/reference/fp8_linear.py.

Each product of 128 elements is added to a float32 sum of its own: the tensor cores keep about 14 bits while they add,
too few for a whole row (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.reference.fp8_linear import GROUP, LEAST_SCALE, Fp8Weight, prepare_fp8_linear
from kernels.reference.kv_dtype import FP8, FP8_MAX

__all__ = ["fp8_linear", "prepare_fp8_linear"]

GROUPS = 8  # that a program quantizes


@triton.jit
def _quantize_tokens(
    x_ptr,
    out_ptr,
    scales_ptr,
    size,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    GROUPS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    num_groups = tl.cdiv(size, GROUP)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + token * size + at, mask=at < size, other=0.0).to(tl.float32)
    scales = tl.maximum(tl.max(tl.abs(x), 1) / LARGEST, LEAST)
    tl.store(scales_ptr + token * num_groups + group, scales, mask=group < num_groups)
    tl.store(out_ptr + token * size + at, (x / scales[:, None]).to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["tokens"])
def _fp8_linear(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BLOCKED: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    row_tiles = tl.cdiv(tokens, ROWS)
    column_tiles: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    # some row tiles pass over the same columns of the weight while those are in the L2 cache
    band = tl.program_id(0) // (TILES * column_tiles)
    first = band * TILES
    height = tl.minimum(row_tiles - first, TILES)
    within = tl.program_id(0) % (TILES * column_tiles)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, GROUP)
    num_groups: tl.constexpr = (IN + GROUP - 1) // GROUP
    x_rows = x_ptr + row.to(tl.int64)[:, None] * IN + at[None, :]
    weight_rows = weight_ptr + column.to(tl.int64)[None, :] * IN + at[:, None]
    x_scales = x_scales_ptr + row * num_groups
    scale = tl.load(scales_ptr)
    block = within // height * COLUMNS // GROUP * num_groups
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for group in tl.range(0, num_groups, num_stages=STAGES):
        inside = group * GROUP + at < IN
        x = tl.load(x_rows + group * GROUP, mask=(row < tokens)[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_rows + group * GROUP, mask=(column < OUT)[None, :] & inside[:, None], other=0.0)
        if BLOCKED:
            scale = tl.load(scales_ptr + block + group)
        both = tl.load(x_scales + group, mask=row < tokens, other=0.0) * scale
        out += tl.dot(x, weight) * both[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(place, out.to(out_ptr.dtype.element_ty), mask=(row < tokens)[:, None] & (column < OUT)[None, :])


@dataclass(frozen=True)
class Shape:
    """How a product is cut up."""

    rows: int  # tokens of a tile
    columns: int  # of the weight's rows: divide GROUP, because a tile has one scale at a time
    stages: int
    warps: int


def fp8_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    x = x.contiguous()
    tokens, in_features = x.shape
    out_features = weight.weight.size(0)
    out = torch.empty((tokens, out_features), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    num_groups = triton.cdiv(in_features, GROUP)
    quantized = torch.empty((tokens, in_features), dtype=FP8, device=x.device)
    scales = torch.empty((tokens, num_groups), dtype=torch.float32, device=x.device)
    _quantize_tokens[(tokens, triton.cdiv(num_groups, GROUPS))](
        x, quantized, scales, in_features, LARGEST=FP8_MAX, LEAST=LEAST_SCALE, GROUP=GROUP, GROUPS=GROUPS, num_warps=4
    )
    shape = shape_for(tokens)
    grid = (triton.cdiv(tokens, shape.rows) * triton.cdiv(out_features, shape.columns),)
    _fp8_linear[grid](
        quantized,
        scales,
        weight.weight,
        weight.scales,
        weight.bias,
        out,
        tokens,
        IN=in_features,
        OUT=out_features,
        BLOCKED=weight.is_blocked,
        GROUP=GROUP,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        TILES=8,
        STAGES=shape.stages,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def shape_for(tokens: int) -> Shape:
    if tokens <= 16:
        return Shape(rows=16, columns=32, stages=5, warps=4)
    if tokens <= 64:
        return Shape(rows=64, columns=64, stages=5, warps=4)
    return Shape(rows=128, columns=128, stages=4, warps=8)
