"""Products of 8-bit weights and activations, int8 or float8_e4m3fn, with scales per token and row, or per 128 columns.

int8 products accumulate exactly, in int32. Tensor cores accumulate 8-bit floats with about 14 bits (DeepSeek-V3, arXiv
2412.19437, section 3.3.2); products of 128 columns with their own scales are added to a float32 sum.

Few tokens are computed here, transposed as weight @ x.T: a Hopper's matrix instructions take at least 64 rows of their
first operand. 8-bit floats of many tokens use the libraries that torch was built with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch.nn.functional import ScalingType, scaled_mm

from quire.kernels.capability import SM80, SM90, ByCapability
from quire.kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight
from quire.kernels.triton.quantization.eight_bit_activations import quantize
from quire.kernels.triton.quantization.split_sums import add_splits

GROUP = 128
DTYPES = (torch.float16, torch.bfloat16)
HAS_SCALED_PRODUCTS = ByCapability({SM80: False, SM90: True})  # torch has products with a scale per row


@dataclass(frozen=True)
class EightBitWeight:
    """8-bit weight with transposed scales, and with scales by block for the libraries if rows of a block share them."""

    codes: torch.Tensor  # [out_features, in_features], int8 or float8_e4m3fn
    scales: torch.Tensor  # float32 [groups, out_features]
    activations: QuantizedActivations
    bias: torch.Tensor | None
    blocks: torch.Tensor | None = None  # `scales` if shared by GROUP rows: float32 [blocks of out_features, groups]

    @property
    def is_grouped(self) -> bool:
        return self.activations.group_size != 0


def eight_bit_takes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Returns whether weight and activations can be multiplied in 8 bits: the same dtype, scales per row or per GROUP
    columns, no zero points or column order."""
    activations = weight.activations
    if activations is None or dtype not in DTYPES or weight.zeros is not None or weight.order is not None:
        return False
    if weight.codes.dtype is not activations.dtype:
        return False
    if activations.group_size == 0:
        return weight.scales.size(1) == 1
    return activations.group_size == weight.group_size == GROUP and activations.scale is None


def pack(weight: QuantizedWeight) -> EightBitWeight:
    """Returns the weight in the layout of the kernel, with contiguous codes and float32 scales [groups,
    out_features]."""
    assert weight.activations is not None
    scales = weight.scales.float().t().contiguous()
    blocks = _blocks(scales) if weight.activations.group_size else None
    return EightBitWeight(weight.codes.contiguous(), scales, weight.activations, weight.bias, blocks)


def _blocks(scales: torch.Tensor) -> torch.Tensor | None:
    """Returns one scale per GROUP x GROUP block from scales [groups, out_features]; None if rows of a block differ."""
    groups, out_features = scales.shape
    if out_features % GROUP:
        return None
    by_block = scales.view(groups, -1, GROUP)
    return by_block[:, :, 0].t().contiguous() if (by_block == by_block[:, :, :1]).all() else None


@triton.jit(do_not_specialize=["tokens"])
def _eight_bit_linear(
    x_ptr,
    x_scales_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    in_features,
    out_features,
    EVEN: tl.constexpr,
    GROUPED: tl.constexpr,
    EXACT: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
    TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiplies a tile of tokens with a tile of the weight's rows, in one split of the features."""
    row_tiles = tl.cdiv(tokens, ROWS)
    column_tiles = tl.cdiv(out_features, COLUMNS)
    # consecutive row tiles use the same weight columns while they are in the L2 cache
    band = tl.program_id(0) // (TILES * column_tiles)
    first = band * TILES
    height = tl.minimum(row_tiles - first, TILES)
    within = tl.program_id(0) % (TILES * column_tiles)
    row = (first + within % height) * ROWS + tl.arange(0, ROWS)
    column = within // height * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    at = tl.arange(0, WIDTH)
    spans = tl.cdiv(in_features, WIDTH)
    each = tl.cdiv(spans, SPLITS)
    weight_rows = weight_ptr + column.to(tl.int64)[:, None] * in_features + at[None, :]
    x_columns = x_ptr + row.to(tl.int64)[None, :] * in_features + at[:, None]
    some, wanted = row < tokens, column < out_features
    out = tl.zeros([COLUMNS, ROWS], tl.int32 if EXACT and not GROUPED else tl.float32)
    for span in tl.range(split * each, tl.minimum(split * each + each, spans), num_stages=STAGES):
        if EVEN:
            weight = tl.load(weight_rows + span * WIDTH, mask=wanted[:, None], other=0.0)
            x = tl.load(x_columns + span * WIDTH, mask=some[None, :], other=0.0)
        else:
            inside = span * WIDTH + at < in_features
            weight = tl.load(weight_rows + span * WIDTH, mask=wanted[:, None] & inside[None, :], other=0.0)
            x = tl.load(x_columns + span * WIDTH, mask=some[None, :] & inside[:, None], other=0.0)
        if GROUPED:
            product = tl.dot(weight, x, out_dtype=tl.int32 if EXACT else tl.float32)
            x_scale = tl.load(x_scales_ptr + span * tokens + row, mask=some, other=0.0)
            scale = tl.load(scales_ptr + span * out_features + column, mask=wanted, other=0.0)
            out += product.to(tl.float32) * scale[:, None] * x_scale[None, :]
        elif EXACT:
            out = tl.dot(weight, x, out, out_dtype=tl.int32)
        else:
            out = tl.dot(weight, x, out)
    inside = wanted[:, None] & some[None, :]
    place = out_ptr + (split * tokens + row).to(tl.int64)[None, :] * out_features + column[:, None]
    if SPLITS > 1:
        tl.store(place, out, mask=inside)
    else:
        total = out.to(tl.float32)
        if not GROUPED:
            x_scale = tl.load(x_scales_ptr + row, mask=some, other=0.0)
            scale = tl.load(scales_ptr + column, mask=wanted, other=0.0)
            total = total * scale[:, None] * x_scale[None, :]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + column, mask=wanted, other=0.0).to(tl.float32)[:, None]
        tl.store(place, total.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class EightBitTile:
    """Tile sizes of a product."""

    rows: int  # tokens of a tile
    columns: int  # rows of the weight
    splits: int  # splits of the sum
    width: int  # columns of the weight at a time; GROUP with grouped scales
    stages: int
    warps: int = 4


@dataclass(frozen=True)
class EightBitTuning:
    """Tile sizes, and limits from which libraries are used."""

    grouped: Mapping[int, EightBitTile]  # by maximum tokens, for weights with grouped scales; smallest first
    by_row: Mapping[
        int, EightBitTile
    ]  # by maximum tokens, for weights with a scale per row; sums are split by shape_for()
    grouped_part: int  # columns per part of a split sum
    by_row_part: int
    most_splits: int
    multiprocessors: int  # with fewer programs, sums are split
    most_rows: int  # above, libraries are faster if they have more tiles than `multiprocessors`


# On an H200 (`python -m tools.bench.kernels.gpu eight_bit_shapes`), 4,096 to 14,336 wide.
TUNING = ByCapability(
    {
        SM90: EightBitTuning(
            grouped={
                16: EightBitTile(16, 64, 1, width=GROUP, stages=4),
                32: EightBitTile(32, 64, 1, width=GROUP, stages=4),
                64: EightBitTile(64, 128, 1, width=GROUP, stages=4),
                1 << 30: EightBitTile(128, 64, 1, width=GROUP, stages=4),
            },
            by_row={
                16: EightBitTile(16, 64, 1, width=2 * GROUP, stages=4),
                32: EightBitTile(32, 64, 1, width=GROUP, stages=6),
                128: EightBitTile(64, 64, 1, width=GROUP, stages=6),
                1 << 30: EightBitTile(128, 64, 1, width=GROUP, stages=6),
            },
            grouped_part=4096,
            by_row_part=8192,
            most_splits=4,
            multiprocessors=132,
            most_rows=64,
        )
    }
)


def shape_for(tokens: int, in_features: int, out_features: int, *, grouped: bool) -> EightBitTile:
    """Returns the tile sizes for a product, split along the features until the programs occupy the GPU."""
    tuning = TUNING.here
    tiles, part = (tuning.grouped, tuning.grouped_part) if grouped else (tuning.by_row, tuning.by_row_part)
    tile = next(tile for most, tile in tiles.items() if tokens <= most)
    programs = triton.cdiv(out_features, tile.columns) * triton.cdiv(tokens, tile.rows)
    splits = 1
    while splits < tuning.most_splits and programs * splits < tuning.multiprocessors and in_features >= part * splits:
        splits *= 2
    return tile if splits == 1 else replace(tile, splits=splits)


def eight_bit_linear(x: torch.Tensor, weight: EightBitWeight, shape: EightBitTile | None = None) -> torch.Tensor:
    """Quantizes x [num_tokens, in_features] and multiplies in 8 bits -> [num_tokens, out_features] in x's dtype; uses a
    library where it is faster, unless `shape` sets the tile sizes."""
    x = x.contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    if not tokens:
        return x.new_empty((0, out_features))
    codes, scales = quantize(x, weight.activations)
    if shape is None and _goes_to_library(x, weight):
        return by_library(codes, scales, weight)
    out = x.new_empty((tokens, out_features))
    shape = shape or shape_for(tokens, in_features, out_features, grouped=weight.is_grouped)
    whole, exact = shape.splits == 1, weight.codes.dtype is torch.int8
    to = out
    if not whole:
        dtype = torch.int32 if exact and not weight.is_grouped else torch.float32
        to = x.new_empty((shape.splits, tokens, out_features), dtype=dtype)
    _eight_bit_linear[(triton.cdiv(tokens, shape.rows) * triton.cdiv(out_features, shape.columns), shape.splits)](
        codes,
        scales,
        weight.codes,
        weight.scales,
        weight.bias if whole else None,
        to,
        tokens,
        in_features,
        out_features,
        EVEN=in_features % shape.width == 0,
        GROUPED=weight.is_grouped,
        EXACT=exact,
        SPLITS=shape.splits,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        WIDTH=shape.width,
        TILES=8,
        STAGES=shape.stages,
        num_warps=shape.warps,
        num_stages=shape.stages,
    )
    if not whole:
        add_splits(to, out, bias=weight.bias, scales=None if weight.is_grouped else (scales, weight.scales))
    return out


def _goes_to_library(x: torch.Tensor, weight: EightBitWeight) -> bool:
    """Returns whether a library computes this product: supported and faster, by measurement on an H200."""
    if weight.codes.dtype is torch.int8 or x.dtype is not torch.bfloat16 or not x.is_cuda:
        return False
    tokens, (out_features, in_features) = x.size(0), weight.codes.shape
    if weight.is_grouped and (weight.blocks is None or in_features % (4 * GROUP)):
        return False
    if in_features % 16 or out_features % 16:
        return False
    tiles = triton.cdiv(out_features, 64) * triton.cdiv(tokens, 128)
    tuning = TUNING.here
    if tokens <= tuning.most_rows or (tiles <= tuning.multiprocessors and not weight.is_grouped):
        return False
    return HAS_SCALED_PRODUCTS.here


def by_library(codes: torch.Tensor, scales: torch.Tensor, weight: EightBitWeight) -> torch.Tensor:
    """Multiplies by a library: codes with `scales` [groups, tokens] -> bfloat16 [tokens, out_features]."""
    if weight.blocks is None:
        kinds, factors = (ScalingType.RowWise,) * 2, (scales.view(-1, 1), weight.scales)
    else:
        kinds, factors = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128), (scales.t(), weight.blocks.t())
    out: torch.Tensor = scaled_mm(
        codes,
        weight.codes.t(),
        factors[0],
        kinds[0],
        factors[1],
        kinds[1],
        output_dtype=torch.bfloat16,
        use_fast_accum=weight.blocks is None,
    )
    return out if weight.bias is None else out.add_(weight.bias)
