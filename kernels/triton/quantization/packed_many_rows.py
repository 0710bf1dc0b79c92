"""Activations of 16 bits times weights of 4, where there are many rows: the matrix units are what has to be kept busy.

Codes are widened, less their zeros and times their scales, in registers, which are the first operand of a Hopper's
matrix instructions; activations come by the copy engine. The steps of all tiles are shared out evenly among as many
programs as run at once, wherever a tile ends: with a program for each tile the last ones would leave most
multiprocessors idle. Whoever is the last to have its part of a tile adds up the parts, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

if TYPE_CHECKING:
    from kernels.triton.quantization.packed_linear import PackedWeight

COLUMNS = 64
LONGEST_STEP = 64  # bytes of codes
LEAST_SPAN = 64  # shorter ones are too short for a step
LEAST_STEPS = 8  # of a program: its first loads are waited for
PLAIN_PROCESSORS = 4  # in the interpreter
# The halves of four bytes, less their zeros, times their scales; all in pairs.
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
    """What the lower and the upper halves of bytes stand for, in 16 bits. `zero` is OFFSET more than that."""
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


@triton.jit
def _part_of_tile(
    x_tiles,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    first_row,
    column,
    first_step,
    end_step,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """[columns, rows] float32, of some steps"""
    WIDTH: tl.constexpr = SPAN // 2
    EACH: tl.constexpr = WIDTH // STEP
    has_column = column < OUT
    codes_of = codes_ptr + column.to(tl.int64)[:, None] * (IN // 2) + tl.arange(0, STEP)[None, :]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for step in tl.range(first_step, end_step, num_stages=STAGES):
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
    return sums


@triton.jit(do_not_specialize=["tokens", "num_programs"])
def _packed_many_rows(
    x_tiles,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    parts_ptr,
    arrivals_ptr,
    out_ptr,
    tokens,
    num_programs,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    ZERO: tl.constexpr,
    OFFSET: tl.constexpr,
    PAIRED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    STAGES: tl.constexpr,
):
    """parts: float32 [programs, 2, columns, rows] of tiles that a program does not have whole, the one that another
    began and the one that another ends; arrivals: int32 [tiles], 0 before and after."""
    DTYPE: tl.constexpr = out_ptr.dtype.element_ty
    STEPS: tl.constexpr = IN // 2 // STEP  # of a tile
    ACROSS: tl.constexpr = (OUT + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    steps = tl.cdiv(tokens, ROWS) * ACROSS * STEPS
    each, more = steps // num_programs, steps % num_programs  # the first `more` programs have one more
    at = program * each + tl.minimum(program, more)
    end = at + each + tl.where(program < more, 1, 0)
    in_tile = tl.arange(0, COLUMNS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    while at < end:
        tile = at // STEPS
        first_step = at % STEPS
        end_step = tl.minimum(STEPS, first_step + end - at)
        column = tile % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
        first_row = tile // ACROSS * ROWS
        sums = _part_of_tile(
            x_tiles, codes_ptr, scales_ptr, zeros_ptr, first_row, column, first_step, end_step,
            IN, OUT, GROUP, SPAN, ZERO, OFFSET, PAIRED, ROWS, COLUMNS, STEP, STAGES, DTYPE,
        )  # fmt: skip
        at += end_step - first_step
        is_last = end_step - first_step == STEPS
        if end_step - first_step < STEPS:
            mine = parts_ptr + (program * 2 + tl.where(first_step == 0, 1, 0)) * (COLUMNS * ROWS)
            tl.store(mine + in_tile, sums)
            begin = tile * STEPS
            first = _program_of(begin, each, more)
            last = _program_of(begin + STEPS - 1, each, more)
            tl.debug_barrier()  # the whole part is stored before anybody hears of it
            is_last = tl.atomic_add(arrivals_ptr + tile, 1) == last - first
            if is_last:
                tl.store(arrivals_ptr + tile, 0)
                sums = tl.load(parts_ptr + (first * 2 + 1) * (COLUMNS * ROWS) + in_tile, cache_modifier=".cg")
                for other in range(first + 1, last + 1):
                    sums += tl.load(parts_ptr + other * 2 * (COLUMNS * ROWS) + in_tile, cache_modifier=".cg")
        if is_last:
            if bias_ptr is not None:
                sums += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
            row = first_row + tl.arange(0, ROWS)
            to = out_ptr + row.to(tl.int64)[None, :] * OUT + column[:, None]
            tl.store(to, sums.to(DTYPE), mask=(column < OUT)[:, None] & (row < tokens)[None, :])


@triton.jit
def _program_of(step, each, more):
    """Which program a step is one of."""
    longer = more * (each + 1)
    return tl.where(step < longer, step // (each + 1), more + (step - longer) // tl.maximum(each, 1))


@dataclass(frozen=True)
class ManyRowsTile:
    """How a product is cut up."""

    rows: int
    stages: int
    programs: int  # that a multiprocessor runs at once


# By measurement on an H200, where the stages of a tile of 256 rows take 205 KiB of a multiprocessor's memory.
TILE = ManyRowsTile(rows=128, stages=3, programs=2)
LARGE_TILE = ManyRowsTile(rows=256, stages=3, programs=1)


def many_rows_takes(span: int, bits: int, table: torch.Tensor | None) -> bool:
    return bits == 4 and table is None and span >= LEAST_SPAN


def no_arrivals(out_features: int, most_rows: int, device: torch.device) -> torch.Tensor:
    """What products with a weight count in."""
    tiles = triton.cdiv(out_features, COLUMNS) * triton.cdiv(most_rows, TILE.rows)
    return torch.zeros(tiles, dtype=torch.int32, device=device)


def packed_many_rows(
    x: torch.Tensor,
    weight: PackedWeight,
    how_codes_are_read: dict[str, object],
    tile: ManyRowsTile | None = None,
    num_programs: int | None = None,
) -> torch.Tensor:
    """x: contiguous, of no more rows than `weight.arrivals` is made for. Products with one weight follow each other."""
    assert weight.arrivals is not None
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    tile = tile or (TILE if tokens <= TILE.rows else LARGE_TILE)
    step = min(LONGEST_STEP, weight.span // 2)
    tiles = triton.cdiv(tokens, tile.rows) * triton.cdiv(out_features, COLUMNS)
    if num_programs is None:
        most = _processors(x.device) * tile.programs
        num_programs = max(1, min(most, tiles * (in_features // 2 // step) // LEAST_STEPS))
    out = x.new_empty((tokens, out_features))
    _packed_many_rows[(num_programs,)](
        TensorDescriptor.from_tensor(x, [tile.rows, step]),
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.bias,
        x.new_empty((num_programs, 2, COLUMNS, tile.rows), dtype=torch.float32),
        weight.arrivals,
        out,
        tokens,
        num_programs,
        IN=in_features,
        OUT=out_features,
        **how_codes_are_read,
        ROWS=tile.rows,
        COLUMNS=COLUMNS,
        STEP=step,
        STAGES=tile.stages,
        num_warps=4,
    )
    return out


@cache
def _processors(device: torch.device) -> int:
    if device.type != "cuda":
        return PLAIN_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count
