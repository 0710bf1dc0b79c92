"""Products of 16-bit activations and 4-bit weights, which are dequantized in registers.

The product is transposed, weight @ x.T: a Hopper's matrix instructions take their first operand from registers, so
dequantized codes never go through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.precompile.shapes import Calls, ModelShape
from quire.kernels.triton.quantization.packed_many_rows import many_rows_takes, packed_many_rows
from quire.kernels.triton.quantization.packed_weight import (
    PackedWeight,
    as_stored,
    empty_weight,
    how_codes_are_read,
    projections,
)
from quire.kernels.triton.quantization.split_sums import add_splits
from quire.kernels.triton.quantization.warp_groups import multiply_in_warp_groups

# Nibbles of four bytes in pairs; element by element takes a tenth longer (H100, 16 to 256 rows).
PAIRS_FLOAT16 = tl.constexpr("""{
.reg .b32 a, b;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x64006400, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, 0x64006400, 0xEA;
lop3.b32 $3, b, 0x000F000F, 0x64006400, 0xEA;
}""")
PAIRS_BFLOAT16 = tl.constexpr(PAIRS_FLOAT16.value.replace("0x64006400", "0x43004300"))


@triton.jit
def _halves(codes, table_ptr, PAIRED: tl.constexpr, DTYPE: tl.constexpr):
    """Converts low and high nibbles of bytes to 16-bit values; without a table the results are larger by OFFSETS."""
    if table_ptr is not None:
        return tl.load(table_ptr + (codes & 15)).to(DTYPE), tl.load(table_ptr + (codes >> 4)).to(DTYPE)
    elif PAIRED and DTYPE == tl.bfloat16:  # noqa: SIM300 - a name of ours, in capitals because it is constant
        return tl.inline_asm_elementwise(
            PAIRS_BFLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    elif PAIRED:
        return tl.inline_asm_elementwise(
            PAIRS_FLOAT16, "=r,=r,=r,=r,r", [codes], dtype=(tl.float16, tl.float16), is_pure=True, pack=4
        )
    else:
        EXPONENT: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x6400
        wide = codes.to(tl.int16)
        low, high = (wide & 15) | EXPONENT, (wide >> 4 & 15) | EXPONENT
        return low.to(DTYPE, bitcast=True), high.to(DTYPE, bitcast=True)


@triton.jit
def _zero_of(zeros_ptr, place, inside, ZERO: tl.constexpr, OFFSET: tl.constexpr, DTYPE: tl.constexpr):
    """Loads zero points [columns, 1], exact in 16 bits."""
    if zeros_ptr is None:
        return tl.full([1, 1], ZERO + OFFSET, DTYPE)
    else:
        return (tl.load(zeros_ptr + place, mask=inside, other=0.0) + OFFSET).to(DTYPE)[:, None]


@triton.jit
def _x_columns(x_ptr, order_ptr, row, at, tokens, IN: tl.constexpr):
    """Loads the columns `at` of some rows of x as [columns, rows], zeros past the tokens; with an order at permuted
    places."""
    if order_ptr is not None:
        at = tl.load(order_ptr + at)
    return tl.load(x_ptr + row.to(tl.int64)[None, :] * IN + at[:, None], mask=(row < tokens)[None, :], other=0.0)


@triton.jit(do_not_specialize=["tokens"])
def _packed_linear(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    order_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Computes a tile of x @ weight.T, ROWS tokens by COLUMNS rows of the weight, over one of SPLITS parts of the
    features. out: [SPLITS, tokens, OUT]; with several parts the caller adds them up, and the bias.

    Codes minus zero points are integers, exact in 16 bits: scales apply to the sums of a span.
    """
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    spans: tl.constexpr = IN // SPAN
    each: tl.constexpr = (spans + SPLITS - 1) // SPLITS
    WIDTH: tl.constexpr = SPAN // 2 if BITS == 4 else SPAN  # bytes per span
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    at = tl.arange(0, WIDTH)
    codes_of = codes_ptr + column.to(tl.int64)[:, None] * (IN * BITS // 8) + at[None, :]
    has_column = column < OUT
    inside = has_column[:, None]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for span in tl.range(split * each, tl.minimum(split * each + each, spans), num_stages=STAGES):
        codes = tl.load(codes_of + span * WIDTH, mask=inside, other=0.0)
        first = span * SPAN
        place = first // GROUP * OUT + column
        zero = _zero_of(zeros_ptr, place, has_column, ZERO, OFFSET, DTYPE)
        x = _x_columns(x_ptr, order_ptr, row, first + at, tokens, IN)
        if BITS == 4:
            low, high = _halves(codes, table_ptr, PAIRED, DTYPE)
            part = tl.dot(low - zero, x)
            x = _x_columns(x_ptr, order_ptr, row, first + WIDTH + at, tokens, IN)
            part = tl.dot(high - zero, x, part)
        else:
            part = tl.dot(codes.to(DTYPE) - zero, x)
        if GROUP < IN:
            part *= tl.load(scales_ptr + place, mask=has_column, other=0.0)[:, None]
        sums += part
    if GROUP == IN:
        sums *= tl.load(scales_ptr + column, mask=has_column, other=0.0)[:, None]
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=has_column, other=0.0).to(tl.float32)[:, None]
    to = out_ptr + (split * tokens + row).to(tl.int64)[None, :] * OUT + column[:, None]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=inside & (row < tokens)[None, :])


@triton.jit
def _widen(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    table_ptr,
    out_ptr,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    BITS: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Dequantizes one span, SPAN features, of COLUMNS rows of a weight. out: [OUT, IN], features as stored."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    span = tl.program_id(1)
    WIDTH: tl.constexpr = SPAN // 2 if BITS == 4 else SPAN
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    at = tl.arange(0, WIDTH)
    rows = column.to(tl.int64)[:, None]
    inside = (column < OUT)[:, None]
    codes = tl.load(codes_ptr + rows * (IN * BITS // 8) + span * WIDTH + at[None, :], mask=inside, other=0.0)
    place = span * SPAN // GROUP * OUT + column
    zero = _zero_of(zeros_ptr, place, column < OUT, ZERO, OFFSET, DTYPE)
    scale = tl.load(scales_ptr + place, mask=column < OUT, other=0.0)[:, None]
    to = out_ptr + rows * IN + span * SPAN + at[None, :]
    if BITS == 4:
        low, high = _halves(codes, table_ptr, PAIRED, DTYPE)
        tl.store(to, ((low - zero).to(tl.float32) * scale).to(DTYPE), mask=inside)
        tl.store(to + WIDTH, ((high - zero).to(tl.float32) * scale).to(DTYPE), mask=inside)
    else:
        tl.store(to, ((codes.to(DTYPE) - zero).to(tl.float32) * scale).to(DTYPE), mask=inside)


@dataclass(frozen=True)
class PackedTile:
    """Tile sizes of a product of packed codes: rows of x, rows of the weight, splits of the features, stages and
    warps."""

    rows: int  # tokens of a tile
    columns: int  # rows of the weight
    splits: int  # splits of the sum
    stages: int
    warps: int


@dataclass(frozen=True)
class PackedTuning:
    """Tile sizes for 4-bit weights, and the selection among kernels."""

    rows: tuple[int, ...]  # maximum rows of tiles; smallest first
    columns: int
    enough_programs: int  # programs that fill the GPU; with fewer, sums are split
    most_splits: int
    least_part: int  # minimum part of a split row
    stages: int
    few_stages: int  # for tiles with the fewest rows
    warps: int
    few_rows: int  # above, compute bound instead of memory bound
    # Above these (where warp_groups.py does not apply) a dequantized copy and cuBLAS are faster, although they write
    # and read 2 more bytes per element.
    most_rows: int
    most_tiled_rows: int  # for packed_many_rows.py
    widened_columns: int  # columns per program that dequantizes


TUNING = ByCapability(
    {
        SM90: PackedTuning(
            rows=(16, 32, 64, 128),
            columns=64,
            enough_programs=256,
            most_splits=8,
            least_part=512,
            stages=4,
            few_stages=5,
            warps=4,
            few_rows=64,
            most_rows=287,
            most_tiled_rows=512,
            widened_columns=32,
        )
    }
)


def shape_for(tokens: int, in_features: int, out_features: int) -> PackedTile:
    """Returns the tile sizes for a product of few tokens, split along the features until there are enough programs."""
    tuning = TUNING.here
    rows = next((rows for rows in tuning.rows if tokens <= rows), tuning.rows[-1])
    programs = triton.cdiv(out_features, tuning.columns) * triton.cdiv(tokens, rows)
    splits = 1
    while (
        splits < tuning.most_splits
        and programs * splits < tuning.enough_programs
        and in_features >= tuning.least_part * splits
    ):
        splits *= 2
    stages = tuning.few_stages if rows == tuning.rows[0] else tuning.stages
    return PackedTile(rows=rows, columns=tuning.columns, splits=splits, stages=stages, warps=tuning.warps)


def packed_linear(x: torch.Tensor, weight: PackedWeight, shape: PackedTile | None = None) -> torch.Tensor:
    """Computes x @ weight.T + bias with packed codes: [num_tokens, in_features] -> [num_tokens, out_features]. Without
    `shape` many tokens use other kernels, or torch with the dequantized weight."""
    x = x.contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    if not tokens:
        return x.new_empty((0, out_features))
    tuning = TUNING.here
    if tokens > tuning.few_rows and shape is None:
        if (out := multiply_in_warp_groups(x, weight)) is not None:
            return out
        tiled = many_rows_takes(weight)
        if tokens > (tuning.most_tiled_rows if tiled else tuning.most_rows):
            return torch.nn.functional.linear(as_stored(x, weight), widened(weight, x.dtype), weight.bias)
        if tiled:
            return packed_many_rows(x, weight)
    shape = shape or shape_for(tokens, in_features, out_features)
    out = x.new_empty((tokens, out_features))
    whole = shape.splits == 1
    to = out if whole else x.new_empty((shape.splits, tokens, out_features), dtype=torch.float32)
    grid = (triton.cdiv(out_features, shape.columns), triton.cdiv(tokens, shape.rows), shape.splits)
    _packed_linear[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.table,
        weight.order,
        weight.bias if whole else None,
        to,
        tokens,
        IN=in_features,
        OUT=out_features,
        **how_codes_are_read(weight, x.dtype),
        BITS=weight.bits,
        SPLITS=shape.splits,
        ROWS=shape.rows,
        COLUMNS=shape.columns,
        STAGES=shape.stages,
        num_warps=shape.warps,
    )
    if not whole:
        add_splits(to, out, bias=weight.bias)
    return out


def widened(weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """Dequantizes the weight to [out_features, in_features], columns as stored."""
    out_features, in_features = weight.codes.size(0), weight.in_features
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.codes.device)
    columns = TUNING.here.widened_columns
    _widen[(triton.cdiv(out_features, columns), in_features // weight.span)](
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.table,
        out,
        IN=in_features,
        OUT=out_features,
        **how_codes_are_read(weight, dtype),
        BITS=weight.bits,
        COLUMNS=columns,
    )
    return out


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the calls of 4-bit products for the model's projections; none without packed weights or
    batch-invariantly."""
    if shape.packed is None or shape.batch_invariant:
        return

    def multiply(rows: int, in_features: int, out_features: int) -> None:
        packed_linear(shape.empty(rows, in_features), empty_weight(shape, in_features, out_features))

    tuning = TUNING.here
    for in_features, out_features, *_ in projections(shape):
        for rows in sorted({*tuning.rows, tuning.most_rows, tuning.most_tiled_rows}, reverse=True):
            yield partial(multiply, rows, in_features, out_features)
        yield partial(widened, empty_weight(shape, in_features, out_features), shape.torch_dtype)
