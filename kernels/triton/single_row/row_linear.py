"""Product of a matrix and one row, fused with norm, gate and residual, for decoding a single sequence.

With one row a product is bound by reading the weight. Each program loads several chunks of its rows before it waits for
the previous kernel (pdl.py), so that memory is busy between the kernels of a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton.pdl import HAS_PDL, launch_dependents, wait_for_inputs
from quire.kernels.triton.precompile.shapes import Calls, ModelShape
from quire.kernels.triton.quantization.eight_bit_linear import GROUP, EightBitWeight
from quire.kernels.triton.quantization.packed_weight import PackedWeight
from quire.kernels.triton.single_row.packed_row_linear import packed_row_linear
from quire.kernels.triton.single_row.row_narrow import Narrow, RowNorm, chunk_of, narrow_of_row, row_narrow

__all__ = ["RowNorm", "RowTile", "row_linear", "row_linear_takes", "row_narrow_as_cut", "shape_for"]


@triton.jit
def _products(
    x_ptr,
    norm_ptr,
    weights,
    scales_ptr,
    row,
    weight_row,
    start,
    at,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Returns squares of x and products with it, of a chunk.

    A weight's scales apply to GROUP of its rows and columns (0: none, or one per row): a program's rows share them, or
    each half of them if gated.
    """
    x, scaled = chunk_of(x_ptr, norm_ptr, start + at, NORM)
    scaled = scaled[None, :]
    if GROUP:
        of_group = scales_ptr + (start + at) // GROUP * (2 * OUT if GATED else OUT)
        scales = tl.load(of_group + tl.min(weight_row, 0))[None, :]
        if GATED:
            others = tl.load(of_group + tl.max(weight_row, 0) // GROUP * GROUP)[None, :]
            scales = tl.where((row < ROWS)[:, None], scales, others)
        scaled = scaled * scales
    return x * x, weights.to(tl.float32) * scaled


@triton.jit(do_not_specialize=["eps", "num_adapters", "num_projections", "num_narrows"])
def _row_linear(
    x_ptr,
    weight_ptr,
    scales_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    starts_ptr,
    table_ptr,
    narrow_ptr,
    eps,
    num_adapters,
    num_projections,
    num_narrows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    AHEAD: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Multiplies; WIDTH: 0 in steps without adapters, otherwise the first `num_narrows` programs compute the row's
    adapter."""
    program = tl.program_id(0)
    if WIDTH > 0:
        if program < num_narrows:
            narrow_of_row(
                x_ptr, norm_ptr, starts_ptr, table_ptr, narrow_ptr, eps, num_adapters, num_projections,
                IN, ROWS, CHUNK, NORM, PDL, WIDTH,
            )  # fmt: skip
            return
        program -= num_narrows
    HALVES: tl.constexpr = 2 if GATED else 1
    row = tl.arange(0, ROWS * HALVES)
    output = program * ROWS + row % ROWS
    weight_row = output + row // ROWS * OUT
    at = tl.arange(0, CHUNK)
    source = weight_ptr + weight_row.to(tl.int64)[:, None] * IN + at[None, :]
    inside = (output < OUT)[:, None]
    if PDL:
        launch_dependents()
    first = tl.load(source, mask=inside, other=0.0)
    if AHEAD > 1:
        second = tl.load(source + CHUNK, mask=inside, other=0.0)
    if AHEAD > 2:
        third = tl.load(source + 2 * CHUNK, mask=inside, other=0.0)
    if PDL:
        wait_for_inputs()

    squares, sums = _products(x_ptr, norm_ptr, first, scales_ptr, row, weight_row, 0, at, OUT, ROWS, NORM, GATED, GROUP)
    if AHEAD > 1:
        more = _products(x_ptr, norm_ptr, second, scales_ptr, row, weight_row, CHUNK, at, OUT, ROWS, NORM, GATED, GROUP)
        squares, sums = squares + more[0], sums + more[1]
    if AHEAD > 2:
        more = _products(
            x_ptr, norm_ptr, third, scales_ptr, row, weight_row, 2 * CHUNK, at, OUT, ROWS, NORM, GATED, GROUP
        )
        squares, sums = squares + more[0], sums + more[1]
    for start in range(AHEAD * CHUNK, IN, CHUNK):
        weight = tl.load(source + start, mask=inside, other=0.0)
        more = _products(x_ptr, norm_ptr, weight, scales_ptr, row, weight_row, start, at, OUT, ROWS, NORM, GATED, GROUP)
        squares, sums = squares + more[0], sums + more[1]

    y = tl.sum(sums, 1)
    if scales_ptr is not None:  # noqa: SIM102 - one is known by the type of an argument, the other by its value
        if GROUP == 0:
            y *= tl.load(scales_ptr + weight_row, mask=output < OUT, other=0.0)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    if bias_ptr is not None:
        y += tl.load(bias_ptr + weight_row, mask=output < OUT, other=0.0).to(tl.float32)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(y, (2, ROWS))))
        y = gate * tl.sigmoid(gate) * up
    output = program * ROWS + tl.arange(0, ROWS)
    to = out_ptr + output
    if ADD:
        y += tl.load(to, mask=output < OUT, other=0.0).to(tl.float32)
    tl.store(to, y.to(out_ptr.dtype.element_ty), mask=output < OUT)


@dataclass(frozen=True)
class RowTile:
    """Work per program of a product: rows of the weight, elements of a row at a time, chunks loaded ahead, warps."""

    rows: int  # rows of the weight per program (of each half if gated)
    chunk: int  # elements of those rows at a time
    ahead: int  # chunks loaded before waiting
    warps: int


def row_linear(
    x: torch.Tensor,
    weight: LinearWeight | EightBitWeight | PackedWeight,
    *,
    norm: RowNorm | None = None,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    narrow: Narrow | None = None,
    pdl: bool = False,
    shape: RowTile | None = None,
) -> torch.Tensor:
    """Computes linear(rms_norm(x), weight) of one row [1, in_features], `norm` if given; `gated`: silu_mul of the
    result.

    With `residual` [1, out_features] the product is added to it in place and it is returned. 8-bit weights are
    multiplied with unquantized x: only products of many rows need both in 8 bits. Packed weights have 4 bits and no
    table.
    """
    if isinstance(weight, PackedWeight):
        out = residual
        if out is None:
            out = x.new_empty((1, weight.codes.size(0) // (2 if gated else 1)))
        if narrow is not None:
            row_narrow_as_cut(x, narrow, norm, pdl=pdl)
        normed = (None, 0.0) if norm is None else (norm.weight, norm.eps)
        packed_row_linear(x, weight, normed, out, gated=gated, adds=residual is not None, pdl=pdl)
        return out
    codes, scales, grouped = (
        (weight.codes, weight.scales, weight.is_grouped)
        if isinstance(weight, EightBitWeight)
        else (weight.weight, None, False)
    )
    assert not (grouped and gated) or codes.size(0) % (2 * GROUP) == 0
    in_features = codes.size(1)
    out_features = codes.size(0) // (2 if gated else 1)
    shape = shape or shape_for(in_features, gated, element_size=codes.element_size())
    out = residual
    if out is None:
        out = torch.empty((1, out_features), dtype=x.dtype, device=x.device)
    launch = {"launch_pdl": True} if pdl else {}
    num_narrows = triton.cdiv(narrow.weights.most_ranks, shape.rows) if narrow else 0
    num_adapters = narrow.weights.table.size(0) if narrow else 0
    _row_linear[(num_narrows + triton.cdiv(out_features, shape.rows),)](
        x,
        codes,
        scales,
        weight.bias,
        None if norm is None else norm.weight,
        out,
        narrow.starts if narrow else None,
        narrow.weights.table if narrow else None,
        narrow.products if narrow else None,
        0.0 if norm is None else norm.eps,
        num_adapters,
        len(narrow.weights.sizes) if narrow else 0,
        num_narrows,
        IN=in_features,
        OUT=out_features,
        ROWS=shape.rows,
        CHUNK=shape.chunk,
        AHEAD=shape.ahead,
        NORM=norm is not None,
        GATED=gated,
        ADD=residual is not None,
        PDL=pdl,
        GROUP=GROUP if grouped else 0,
        WIDTH=triton.next_power_of_2(num_adapters) if narrow else 0,
        num_warps=shape.warps,
        **launch,
    )
    return out


def row_narrow_as_cut(x: torch.Tensor, narrow: Narrow, norm: RowNorm | None, *, pdl: bool) -> None:
    """Computes the adapter's first product in a launch of its own, with the tiles of a 16-bit product."""
    tile = shape_for(x.size(1), gated=False)
    row_narrow(x, narrow, norm, rows=tile.rows, chunk=tile.chunk, warps=tile.warps, pdl=pdl)


def row_linear_takes(in_features: int) -> bool:
    """Returns whether rows consist of whole chunks of at least a warp's vectors of 16-bit elements."""
    return in_features % 256 == 0


@dataclass(frozen=True)
class RowLinearTuning:
    """Work per program, by the length of a weight's row and the bytes of its elements."""

    long: Mapping[int, RowTile]  # by minimum elements of 16-bit rows, if the chunk divides them; longest first
    long_8_bit_from: int  # elements
    long_8_bit: RowTile  # its chunk is reduced to the largest that divides a row
    short: RowTile  # likewise, with at most the chunks of a row ahead
    whole_gated_rows: int  # rows for `short` if a row of a gated product is one chunk


# On an H200. 4,096 wide: chunks of 2,048, two ahead, take 55 us for 28,672 rows (52 are the bytes), where chunks of
# 1,024, three ahead, take 72: too many registers. 8,192 wide: 2 rows in chunks of 4,096 take 106 us for 28,672 rows
# (103), where 4 rows in chunks of 2,048 take 152: only the first load overlaps. 1,024 wide: 8 rows a program if
# they are gated (3.9 us for 4.5), else 4. In 8 bits: chunks of 1,024 of 8 rows, two ahead: 37 us for 28,672 rows (26
# are the bytes), 17 for 14,336 x 4,096 (13), where the others take 45 and 21.
TUNING = ByCapability(
    {
        SM90: RowLinearTuning(
            long={
                8192: RowTile(rows=2, chunk=4096, ahead=2, warps=8),
                4096: RowTile(rows=4, chunk=2048, ahead=2, warps=8),
            },
            long_8_bit_from=4096,
            long_8_bit=RowTile(rows=8, chunk=1024, ahead=2, warps=4),
            short=RowTile(rows=4, chunk=1024, ahead=3, warps=4),
            whole_gated_rows=8,
        )
    }
)


def shape_for(in_features: int, gated: bool, *, element_size: int = 2) -> RowTile:
    """Returns the work per program for the length of a weight's row, its elements' bytes, and whether the product is
    gated."""
    tuning = TUNING.here
    if element_size == 2:
        for least, tile in tuning.long.items():
            if in_features >= least and in_features % tile.chunk == 0:
                return tile
    is_long_8_bit = element_size == 1 and in_features >= tuning.long_8_bit_from
    tile = tuning.long_8_bit if is_long_8_bit else tuning.short
    chunk = tile.chunk
    while in_features % chunk:
        chunk //= 2
    if is_long_8_bit:
        return RowTile(tile.rows, chunk, tile.ahead, tile.warps)
    rows = tuning.whole_gated_rows if gated and in_features == chunk else tile.rows
    return RowTile(rows, chunk, min(in_features // chunk, tile.ahead), tile.warps)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the calls of the model's projections, vocabulary and router, if it runs single rows."""
    if not shape.runs_single_rows:
        return

    def multiply(in_features: int, out_features: int, gated: bool, adds: bool) -> None:
        norm = None if adds else RowNorm(shape.empty(in_features), 1e-6)
        residual = shape.empty(1, out_features) if adds else None
        weight = LinearWeight(shape.empty(out_features, in_features), None)
        row_linear(shape.empty(1, in_features), weight, norm=norm, gated=gated, residual=residual, pdl=HAS_PDL.here)

    hidden, features, leaves = shape.hidden_size, shape.intermediate_size, shape.is_whole
    if shape.packed is None:  # otherwise packed_row_linear.py
        yield partial(multiply, hidden, shape.qkv_size, False, False)
        yield partial(multiply, shape.q_size, hidden, False, leaves)
        yield partial(multiply, hidden, 2 * features, True, False)
        yield partial(multiply, features, hidden, False, leaves)
    yield partial(multiply, hidden, shape.vocab_size, False, False)
    if shape.experts is not None and shape.experts.single_row:
        yield partial(multiply, hidden, shape.experts.num_experts, False, False)
