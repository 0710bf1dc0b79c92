"""Products of 16-bit activations and 4-bit weights with many rows: bound by the matrix units.

Codes are dequantized in registers, which are the first operand of a Hopper's matrix instructions; activations are
loaded by the copy engine. `python -m tools.bench.kernels.gpu packed_rows` shows where it is faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.quantization.packed_weight import PackedWeight, as_stored, how_codes_are_read
from quire.kernels.triton.quantization.split_sums import add_splits

LEAST_SPAN = 64  # shorter spans are too short for a step
# Nibbles of four bytes, minus zero points, times scales, in pairs.
SCALED_BFLOAT16 = tl.constexpr("""{
.reg .b32 a, b, less, none;
mov.b32 less, 0xBF80BF80;
mov.b32 none, 0x80008000;
prmt.b32 a, $4, 0, 0x4140;
prmt.b32 b, $4, 0, 0x4342;
lop3.b32 $0, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $1, b, 0x000F000F, 0x43004300, 0xEA;
shr.u32 a, a, 4;
shr.u32 b, b, 4;
lop3.b32 $2, a, 0x000F000F, 0x43004300, 0xEA;
lop3.b32 $3, b, 0x000F000F, 0x43004300, 0xEA;
fma.rn.bf16x2 $0, $5, less, $0;
fma.rn.bf16x2 $1, $6, less, $1;
fma.rn.bf16x2 $2, $5, less, $2;
fma.rn.bf16x2 $3, $6, less, $3;
fma.rn.bf16x2 $0, $0, $7, none;
fma.rn.bf16x2 $1, $1, $8, none;
fma.rn.bf16x2 $2, $2, $7, none;
fma.rn.bf16x2 $3, $3, $8, none;
}""")
SCALED_FLOAT16 = tl.constexpr(
    SCALED_BFLOAT16.value.replace("0x43004300", "0x64006400")
    .replace("0xBF80BF80", "0xBC00BC00")
    .replace("bf16x2", "f16x2")
)


@triton.jit
def _scaled(codes, zero, scale, PAIRED: tl.constexpr, DTYPE: tl.constexpr):
    """Dequantizes low and high nibbles of bytes to 16 bits. `zero` includes OFFSET."""
    if PAIRED and DTYPE == tl.bfloat16:  # noqa: SIM300 - a name of ours, in capitals because it is constant
        return tl.inline_asm_elementwise(
            SCALED_BFLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, zero, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    elif PAIRED:
        return tl.inline_asm_elementwise(
            SCALED_FLOAT16,
            "=&r,=&r,=&r,=&r,r,r,r,r,r",
            [codes, zero, scale],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=4,
        )
    else:
        EXPONENT: tl.constexpr = 0x4300 if tl.bfloat16 == DTYPE else 0x6400
        wide = codes.to(tl.int16)
        low, high = (wide & 15) | EXPONENT, (wide >> 4 & 15) | EXPONENT
        return (low.to(DTYPE, bitcast=True) - zero) * scale, (high.to(DTYPE, bitcast=True) - zero) * scale


@triton.jit(do_not_specialize=["tokens"])
def _packed_many_rows(
    x_tiles,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Multiplies; STEP: bytes of a weight's row, each with two codes half a span apart."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    first_row = tl.program_id(1) * ROWS
    split = tl.program_id(2)
    WIDTH: tl.constexpr = SPAN // 2
    EACH: tl.constexpr = WIDTH // STEP
    steps: tl.constexpr = IN // 2 // STEP
    part: tl.constexpr = (steps + SPLITS - 1) // SPLITS
    has_column = column < OUT
    codes_of = codes_ptr + column.to(tl.int64)[:, None] * (IN // 2) + tl.arange(0, STEP)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.range(split * part, tl.minimum(split * part + part, steps), num_stages=STAGES):
        codes = tl.load(codes_of + step * STEP, mask=has_column[:, None], other=0)
        first = step // EACH * SPAN + step % EACH * STEP
        place = first // GROUP * OUT + column
        scale = tl.load(scales_ptr + place, mask=has_column, other=0.0).to(DTYPE)
        if zeros_ptr is None:
            zero = tl.full([COLUMNS], ZERO + OFFSET, DTYPE)
        else:
            zero = (tl.load(zeros_ptr + place, mask=has_column, other=0.0) + OFFSET).to(DTYPE)
        low, high = _scaled(
            codes,
            tl.broadcast_to(zero[:, None], [COLUMNS, STEP]),
            tl.broadcast_to(scale[:, None], [COLUMNS, STEP]),
            PAIRED,
            DTYPE,
        )
        sums = tl.dot(low, tl.trans(x_tiles.load([first_row, first])), sums)
        sums = tl.dot(high, tl.trans(x_tiles.load([first_row, first + WIDTH])), sums)
        if PAIRED:
            # Forces a wait for the sums: otherwise the second product may still read the registers into which the next
            # codes are dequantized (Triton 3.6 and 3.9; occasionally wrong results).
            sums = tl.inline_asm_elementwise("", "=f,0", [sums], dtype=tl.float32, is_pure=False, pack=1)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=has_column, other=0.0).to(tl.float32)[:, None]
    row = first_row + tl.arange(0, ROWS)
    to = out_ptr + (split * tokens + row).to(tl.int64)[None, :] * OUT + column[:, None]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=has_column[:, None] & (row < tokens)[None, :])


@dataclass(frozen=True)
class ManyRowsTile:
    """Tile sizes of a product with many rows: rows of x, splits of the features and stages."""

    rows: int
    splits: int  # splits of the sum
    stages: int = 3


@dataclass(frozen=True)
class ManyRowsTuning:
    """Tile sizes of products with many rows."""

    rows: int  # of a tile
    long_rows: int  # rows of a tile if there are `enough_long_tiles`
    enough_long_tiles: int
    columns: int  # rows of the weight
    longest_step: int  # bytes of codes
    processors: int
    least_part: int  # minimum part of a row if every multiprocessor has work already
    most_splits: int
    stages: int
    warps: int


# A multiprocessor of an H200 holds one tile of 256 rows or two of 128.
TUNING = ByCapability(
    {
        SM90: ManyRowsTuning(
            rows=128,
            long_rows=256,
            enough_long_tiles=90,
            columns=64,
            longest_step=64,
            processors=132,
            least_part=3072,
            most_splits=4,
            stages=3,
            warps=4,
        )
    }
)


def tile_for(tokens: int, in_features: int, out_features: int) -> ManyRowsTile:
    """Returns the tile sizes for a product, split along the features until the programs occupy the GPU."""
    tuning = TUNING.here
    across = triton.cdiv(out_features, tuning.columns)
    is_long = tokens > tuning.rows and triton.cdiv(tokens, tuning.long_rows) * across >= tuning.enough_long_tiles
    rows = tuning.long_rows if is_long else tuning.rows
    programs, splits = triton.cdiv(tokens, rows) * across, 1
    while splits < tuning.most_splits and (
        2 * splits * programs <= tuning.processors
        or (splits * programs < 2 * tuning.processors - 8 and in_features >= 2 * splits * tuning.least_part)
    ):
        splits *= 2
    return ManyRowsTile(rows, splits, tuning.stages)


def many_rows_takes(weight: PackedWeight) -> bool:
    """Returns whether the kernel supports the weight: 4 bits without a table, in long enough spans."""
    return weight.bits == 4 and weight.table is None and weight.span >= LEAST_SPAN


def packed_many_rows(x: torch.Tensor, weight: PackedWeight, tile: ManyRowsTile | None = None) -> torch.Tensor:
    """Computes packed_linear, [num_tokens, in_features] -> [num_tokens, out_features], for weights accepted by
    many_rows_takes(). `tile`: sizes instead of tile_for()'s."""
    x = as_stored(x, weight).contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    tile, tuning = tile or tile_for(tokens, in_features, out_features), TUNING.here
    step = min(tuning.longest_step, weight.span // 2)
    whole = tile.splits == 1
    out = x.new_empty((tokens, out_features))
    to = out if whole else x.new_empty((tile.splits, tokens, out_features), dtype=torch.float32)
    grid = (triton.cdiv(out_features, tuning.columns), triton.cdiv(tokens, tile.rows), tile.splits)
    _packed_many_rows[grid](
        TensorDescriptor.from_tensor(x, [tile.rows, step]),
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.bias if whole else None,
        to,
        tokens,
        IN=in_features,
        OUT=out_features,
        **how_codes_are_read(weight, x.dtype),
        SPLITS=tile.splits,
        ROWS=tile.rows,
        COLUMNS=tuning.columns,
        STEP=step,
        STAGES=tile.stages,
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        num_warps=tuning.warps,
    )
    if not whole:
        add_splits(to, out, bias=weight.bias)
    return out
