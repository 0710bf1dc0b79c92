"""Weights and activations in 8 bits, int8 or float8_e4m3fn: a scale for a token and one for a weight's row, or both for
every 128 columns.

int8 products add up exactly, in int32. Each product of 128 8-bit floats is added to a float32 sum of its own: the
tensor cores keep about 14 bits while they add (DeepSeek-V3, arXiv 2412.19437, section 3.3.2).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.reference.quantized_linear import LARGEST, LEAST_SCALE, QuantizedActivations, QuantizedWeight

GROUP = 128
DTYPES = (torch.float16, torch.bfloat16)
TO_INTEGER = 12582912.0  # 1.5 * 2^23: a float32 that is added to this has no bits left under the point


@dataclass(frozen=True)
class EightBitWeight:
    codes: torch.Tensor  # [out_features, in_features], int8 or float8_e4m3fn
    scales: torch.Tensor  # float32 [groups, out_features]
    activations: QuantizedActivations
    bias: torch.Tensor | None

    @property
    def is_grouped(self) -> bool:
        return self.activations.group_size != 0


def eight_bit_takes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    activations = weight.activations
    if activations is None or dtype not in DTYPES or weight.zeros is not None or weight.order is not None:
        return False
    if weight.codes.dtype is not activations.dtype:
        return False
    if activations.group_size == 0:
        return weight.scales.size(1) == 1
    return activations.group_size == weight.group_size == GROUP and activations.scale is None


@triton.jit(do_not_specialize=["tokens"])
def _quantize(
    x_ptr,
    given_ptr,
    out_ptr,
    scales_ptr,
    size,
    tokens,
    WIDTH: tl.constexpr,
    LARGEST: tl.constexpr,
    LEAST: tl.constexpr,
    ROUND: tl.constexpr,
    MAGIC: tl.constexpr,
):
    """WIDTH elements of a token, that share a scale; scales [groups, tokens]."""
    token, group = tl.program_id(0), tl.program_id(1)
    at = group * WIDTH + tl.arange(0, WIDTH)
    source = token.to(tl.int64) * size + at
    x = tl.load(x_ptr + source, mask=at < size, other=0.0).to(tl.float32)
    if given_ptr is not None:  # noqa: SIM108 - known to the compiler: only one branch is there
        scale = tl.load(given_ptr)
    else:
        scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, LEAST)
    tl.store(scales_ptr + group * tokens + token, scale)
    codes = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    if ROUND:
        codes = (codes + MAGIC) - MAGIC
    tl.store(out_ptr + source, codes.to(out_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["tokens"])
def _eight_bit_linear(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
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
    some, wanted = row < tokens, column < OUT
    out = tl.zeros([ROWS, COLUMNS], tl.int32 if EXACT and not GROUPED else tl.float32)
    for group in tl.range(0, num_groups, num_stages=STAGES):
        inside = group * GROUP + at < IN
        x = tl.load(x_rows + group * GROUP, mask=some[:, None] & inside[None, :], other=0.0)
        weight = tl.load(weight_rows + group * GROUP, mask=wanted[None, :] & inside[:, None], other=0.0)
        if EXACT:  # noqa: SIM108
            product = tl.dot(x, weight, out_dtype=tl.int32)
        else:
            product = tl.dot(x, weight)
        if GROUPED:
            x_scale = tl.load(x_scales_ptr + group * tokens + row, mask=some, other=0.0)
            scale = tl.load(scales_ptr + group * OUT + column, mask=wanted, other=0.0)
            out += product.to(tl.float32) * x_scale[:, None] * scale[None, :]
        else:
            out += product
    total = out.to(tl.float32)
    if not GROUPED:
        x_scale = tl.load(x_scales_ptr + row, mask=some, other=0.0)
        scale = tl.load(scales_ptr + column, mask=wanted, other=0.0)
        total = total * x_scale[:, None] * scale[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + column, mask=wanted, other=0.0).to(tl.float32)[None, :]
    place = out_ptr + row.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(place, total.to(out_ptr.dtype.element_ty), mask=some[:, None] & wanted[None, :])


@dataclass(frozen=True)
class Shape:
    """How a product is cut up."""

    rows: int  # tokens of a tile
    columns: int  # of the weight's rows
    stages: int
    warps: int


def shape_for(tokens: int) -> Shape:
    if tokens <= 16:
        return Shape(rows=16, columns=32, stages=5, warps=4)
    if tokens <= 64:
        return Shape(rows=64, columns=64, stages=5, warps=4)
    return Shape(rows=128, columns=128, stages=4, warps=8)


def eight_bit_linear(x: torch.Tensor, weight: EightBitWeight, shape: Shape | None = None) -> torch.Tensor:
    x = x.contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    out = x.new_empty((tokens, out_features))
    if not tokens:
        return out
    codes, scales = quantize(x, weight.activations)
    shape = shape or shape_for(tokens)
    grid = (triton.cdiv(tokens, shape.rows) * triton.cdiv(out_features, shape.columns),)
    _eight_bit_linear[grid](
        codes,
        scales,
        weight.codes,
        weight.scales,
        weight.bias,
        out,
        tokens,
        IN=in_features,
        OUT=out_features,
        GROUPED=weight.is_grouped,
        EXACT=weight.codes.dtype is torch.int8,
        GROUP=GROUP,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        TILES=8,
        STAGES=shape.stages,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    return out


def quantize(x: torch.Tensor, wanted: QuantizedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, in_features] -> codes of that shape, float32 scales [groups, num_tokens]."""
    tokens, size = x.shape
    width = wanted.group_size or triton.next_power_of_2(size)
    groups = triton.cdiv(size, width)
    codes = torch.empty((tokens, size), dtype=wanted.dtype, device=x.device)
    scales = torch.empty((groups, tokens), dtype=torch.float32, device=x.device)
    _quantize[(tokens, groups)](
        x,
        wanted.scale,
        codes,
        scales,
        size,
        tokens,
        WIDTH=width,
        LARGEST=LARGEST[wanted.dtype],
        LEAST=LEAST_SCALE,
        ROUND=wanted.dtype is torch.int8,
        MAGIC=TO_INTEGER,
        num_warps=8 if width > 4096 else 4 if width > 512 else 1,
    )
    return codes, scales
