"""Activations of 16 bits times weights of 4 or 8: codes are widened in registers and multiplied as what they stand for.

The product is computed the other way round, weight @ x.T: a Hopper's matrix instructions take their first operand from
registers, so that widened codes never go through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.reference.quantized_linear import QuantizedWeight
from kernels.triton.split_sums import add_splits

SPANS = (
    128,
    64,
    32,
)  # columns that are stored together: of 4-bit codes the first half of them in the lower halves of bytes
ENOUGH_PROGRAMS = 264  # two for each of a Hopper's multiprocessors
MOST_SPLITS = 8
MANY_ROWS = 1024  # from here on a widened copy and cuBLAS: 2 bytes an element to write and read, beside that product
DTYPES = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class PackedWeight:
    """Codes in the order in which products take them."""

    codes: torch.Tensor  # [out_features, in_features], of 4 bits two to a byte: [out_features, in_features / 2]
    scales: torch.Tensor  # float32 [groups, out_features]
    zeros: torch.Tensor | None  # the same
    group_size: int
    bits: int
    span: int
    table: torch.Tensor | None  # float32 [16]
    order: torch.Tensor | None  # int32 [in_features]
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.codes.size(1) * 8 // self.bits


def packed_takes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    in_features = weight.codes.size(1)
    whole = weight.group_size >= SPANS[-1] and weight.group_size & (weight.group_size - 1) == 0
    return (
        dtype in DTYPES
        and weight.bits in (4, 8)
        and in_features % SPANS[-1] == 0
        and (whole or weight.scales.size(1) == 1)
    )


def pack(weight: QuantizedWeight) -> PackedWeight:
    out_features, in_features = weight.codes.shape
    one = weight.scales.size(1) == 1
    span = next(span for span in SPANS if in_features % span == 0)
    codes = weight.codes
    if weight.bits == 4:
        low, high = codes.view(out_features, -1, 2, span // 2).unbind(2)
        codes = (low | high << 4).flatten(1)
    return PackedWeight(
        codes.contiguous(),
        weight.scales.float().t().contiguous(),
        None if weight.zeros is None else weight.zeros.float().t().contiguous(),
        in_features if one else weight.group_size,
        weight.bits,
        span,
        weight.table,
        None if weight.order is None else weight.order.int(),
        weight.bias,
    )


@triton.jit
def _of_groups(
    of_ptr, first, column, OUT: tl.constexpr, GROUP: tl.constexpr, COLUMNS: tl.constexpr, WIDTH: tl.constexpr
):
    """What the groups of the WIDTH elements from `first` on have, [columns, WIDTH], or [columns, 1] of one."""
    if GROUP < WIDTH:
        group = first // GROUP + tl.arange(0, WIDTH // GROUP)
        place = group[None, :] * OUT + column[:, None]
        each = tl.load(of_ptr + place, mask=(column < OUT)[:, None], other=0.0)
        return tl.reshape(tl.broadcast_to(each[:, :, None], (COLUMNS, WIDTH // GROUP, GROUP)), (COLUMNS, WIDTH))
    else:
        return tl.load(of_ptr + first // GROUP * OUT + column, mask=column < OUT, other=0.0)[:, None]


@triton.jit
def _values(
    codes,
    table_ptr,
    scales_ptr,
    zeros_ptr,
    first,
    column,
    OUT: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """codes [columns, WIDTH] -> what they stand for, float32; `first`: the place of the first in its row."""
    values = tl.load(table_ptr + codes) if table_ptr is not None else codes.to(tl.float32)
    if zeros_ptr is not None:
        values -= _of_groups(zeros_ptr, first, column, OUT, GROUP, COLUMNS, WIDTH)
    return values * _of_groups(scales_ptr, first, column, OUT, GROUP, COLUMNS, WIDTH)


@triton.jit
def _x_columns(x_ptr, order_ptr, row, at, tokens, IN: tl.constexpr):
    """[n, rows]"""
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
    SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    split = tl.program_id(2)
    spans: tl.constexpr = IN // SPAN
    each: tl.constexpr = (spans + SPLITS - 1) // SPLITS
    WIDTH: tl.constexpr = SPAN // 2 if BITS == 4 else SPAN  # bytes of a span
    at = tl.arange(0, WIDTH)
    codes_of = codes_ptr + column.to(tl.int64)[:, None] * (IN * BITS // 8) + at[None, :]
    inside = (column < OUT)[:, None]
    sums = tl.zeros([COLUMNS, ROWS], tl.float32)
    for span in tl.range(split * each, tl.minimum(split * each + each, spans), num_stages=STAGES):
        codes = tl.load(codes_of + span * WIDTH, mask=inside, other=0.0)
        first = span * SPAN
        if BITS == 4:
            low = _values(codes & 15, table_ptr, scales_ptr, zeros_ptr, first, column, OUT, GROUP, COLUMNS, WIDTH)
            x = _x_columns(x_ptr, order_ptr, row, first + at, tokens, IN)
            sums = tl.dot(low.to(x.dtype), x, sums)
            high = _values(
                codes >> 4, table_ptr, scales_ptr, zeros_ptr, first + WIDTH, column, OUT, GROUP, COLUMNS, WIDTH
            )
            x = _x_columns(x_ptr, order_ptr, row, first + WIDTH + at, tokens, IN)
            sums = tl.dot(high.to(x.dtype), x, sums)
        else:
            values = _values(codes, table_ptr, scales_ptr, zeros_ptr, first, column, OUT, GROUP, COLUMNS, WIDTH)
            x = _x_columns(x_ptr, order_ptr, row, first + at, tokens, IN)
            sums = tl.dot(values.to(x.dtype), x, sums)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[:, None]
    place = out_ptr + (split * tokens + row).to(tl.int64)[None, :] * OUT + column[:, None]
    tl.store(place, sums.to(out_ptr.dtype.element_ty), mask=inside & (row < tokens)[None, :])


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
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    span = tl.program_id(1)
    WIDTH: tl.constexpr = SPAN // 2 if BITS == 4 else SPAN
    at = tl.arange(0, WIDTH)
    rows = column.to(tl.int64)[:, None]
    inside = (column < OUT)[:, None]
    codes = tl.load(codes_ptr + rows * (IN * BITS // 8) + span * WIDTH + at[None, :], mask=inside, other=0.0)
    first = span * SPAN
    place = out_ptr + rows * IN + first + at[None, :]
    if BITS == 4:
        low = _values(codes & 15, table_ptr, scales_ptr, zeros_ptr, first, column, OUT, GROUP, COLUMNS, WIDTH)
        high = _values(codes >> 4, table_ptr, scales_ptr, zeros_ptr, first + WIDTH, column, OUT, GROUP, COLUMNS, WIDTH)
        tl.store(place, low.to(out_ptr.dtype.element_ty), mask=inside)
        tl.store(place + WIDTH, high.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        values = _values(codes, table_ptr, scales_ptr, zeros_ptr, first, column, OUT, GROUP, COLUMNS, WIDTH)
        tl.store(place, values.to(out_ptr.dtype.element_ty), mask=inside)


@dataclass(frozen=True)
class PackedTile:
    """How a product is cut up."""

    rows: int  # tokens of a tile
    columns: int  # of the weight's rows
    splits: int  # of the sum
    stages: int
    warps: int


def shape_for(tokens: int, in_features: int, out_features: int) -> PackedTile:
    if tokens > 64:
        return PackedTile(rows=128, columns=128, splits=1, stages=3, warps=8)
    programs = triton.cdiv(out_features, 64)
    splits = 1
    while splits < MOST_SPLITS and programs * splits < ENOUGH_PROGRAMS and in_features >= 512 * splits:
        splits *= 2
    return PackedTile(
        rows=16 if tokens <= 16 else 32 if tokens <= 32 else 64, columns=64, splits=splits, stages=4, warps=4
    )


def packed_linear(x: torch.Tensor, weight: PackedWeight, shape: PackedTile | None = None) -> torch.Tensor:
    x = x.contiguous()
    tokens, in_features = x.shape
    out_features = weight.codes.size(0)
    if not tokens:
        return x.new_empty((0, out_features))
    if tokens >= MANY_ROWS and shape is None:
        ordered = x if weight.order is None else x.index_select(1, weight.order)
        return torch.nn.functional.linear(ordered, widened(weight, x.dtype), weight.bias)
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
        GROUP=weight.group_size,
        SPAN=weight.span,
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
    """[out_features, in_features], columns as they are stored"""
    out_features, in_features = weight.codes.size(0), weight.in_features
    out = torch.empty((out_features, in_features), dtype=dtype, device=weight.codes.device)
    _widen[(triton.cdiv(out_features, 32), in_features // weight.span)](
        weight.codes,
        weight.scales,
        weight.zeros,
        weight.table,
        out,
        IN=in_features,
        OUT=out_features,
        GROUP=weight.group_size,
        SPAN=weight.span,
        BITS=weight.bits,
        COLUMNS=32,
    )
    return out
