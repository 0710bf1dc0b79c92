"""Second product of an adapter in the chain for single rows; the first runs with the layer's product (row_narrow.py).

Operations after a product in the chain (gate, residual) have to follow the adapter's addition, and so are done here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.reference.low_rank import AdaptedRows
from quire.kernels.triton.low_rank import adapted_layers, empty_table
from quire.kernels.triton.low_rank_table import COLUMNS, NUM_WORDS, adapter_of_row, weight_at
from quire.kernels.triton.pdl import HAS_PDL, launch_dependents, wait_for_inputs
from quire.kernels.triton.precompile.shapes import Calls, ModelShape
from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear, row_narrow_as_cut
from quire.kernels.triton.single_row.row_narrow import Narrow


@dataclass(frozen=True)
class RowLowRankTuning:
    """Columns and ranks at a time of the second product."""

    columns: int  # columns of the result per program; divides low_rank_table.COLUMNS
    ranks: int  # at a time
    warps: int


TUNING = ByCapability({SM90: RowLowRankTuning(columns=32, ranks=64, warps=4)})


@triton.jit
def _up(up_ptr, column, has_column, low, ranks, RANKS: tl.constexpr):
    rank = low + tl.arange(0, RANKS)
    inside = has_column[:, None] & (rank < ranks)[None, :]
    return tl.load(up_ptr + column.to(tl.int64)[:, None] * ranks + rank[None, :], mask=inside, other=0.0)


@triton.jit
def _narrow_part(narrow_ptr, projection, low, ranks, RANKS: tl.constexpr):
    rank = low + tl.arange(0, RANKS)
    return tl.load(narrow_ptr + projection * ranks + rank, mask=rank < ranks, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _adapted(
    y_ptr,
    narrow_ptr,
    up_ptr,
    gains,
    first,
    column,
    has_column,
    projection,
    ranks,
    OUT: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Returns the layer's outputs with the adapter's; `first`: preloaded part of `up`; `gains`: their address."""
    sums = first.to(tl.float32) * _narrow_part(narrow_ptr, projection, 0, ranks, RANKS)
    for low in range(RANKS, ranks, RANKS):
        up = _up(up_ptr, column, has_column, low, ranks, RANKS)
        sums += up.to(tl.float32) * _narrow_part(narrow_ptr, projection, low, ranks, RANKS)
    y = tl.load(y_ptr + column, mask=has_column, other=0.0).to(tl.float32)
    if (gains != 0) & (ranks > 0):
        gains_at = gains.to(tl.pointer_type(tl.float32)) + column
        y = y * tl.load(gains_at, mask=has_column, other=0.0) + tl.load(gains_at + OUT, mask=has_column, other=0.0)
    return y + tl.sum(sums, 1)


@triton.jit(do_not_specialize=["num_adapters", "num_column_tiles"])
def _row_low_rank(
    y_ptr,
    narrow_ptr,
    starts_ptr,
    table_ptr,
    column_tiles_ptr,
    out_ptr,
    num_adapters,
    num_column_tiles,
    OUT: tl.constexpr,
    PROJECTIONS: tl.constexpr,
    COLUMNS: tl.constexpr,
    PER_TILE: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    PDL: tl.constexpr,
):
    """Adds the adapter's output; GATED: y has 2 * OUT elements, gates first. PER_TILE: programs per column tile."""
    number, ranks = adapter_of_row(starts_ptr, table_ptr, num_adapters, WIDTH)
    up_ptr = weight_at(table_ptr, number, 1, out_ptr)
    gains = tl.load(table_ptr + number * NUM_WORDS + 3)
    program = tl.program_id(0)
    if GATED:
        column = program * COLUMNS + tl.arange(0, COLUMNS)
        has_column = column < OUT
        projection = 0
    else:
        tile = program // PER_TILE
        projection = tl.load(column_tiles_ptr + tile)
        first_column = tl.load(column_tiles_ptr + num_column_tiles + tile) + program % PER_TILE * COLUMNS
        column = first_column + tl.arange(0, COLUMNS)
        has_column = column < tl.load(column_tiles_ptr + 2 * num_column_tiles + tile)
    if PDL:
        launch_dependents()
    first = _up(up_ptr, column, has_column, 0, ranks, RANKS)
    if GATED:
        second = _up(up_ptr, column + OUT, has_column, 0, ranks, RANKS)
    if PDL:
        wait_for_inputs()
    HALVES: tl.constexpr = 2 if GATED else 1
    y = _adapted(y_ptr, narrow_ptr, up_ptr, gains, first, column, has_column, projection, ranks, OUT * HALVES, RANKS)
    if GATED:
        up = _adapted(
            y_ptr,
            narrow_ptr,
            up_ptr,
            gains,
            second,
            column + OUT,
            has_column,
            PROJECTIONS - 1,
            ranks,
            OUT * HALVES,
            RANKS,
        )
        y = y * tl.sigmoid(y) * up
    if ADD:
        y += tl.load(out_ptr + column, mask=has_column, other=0.0).to(tl.float32)
    tl.store(out_ptr + column, y.to(out_ptr.dtype.element_ty), mask=has_column)


def row_low_rank(
    y: torch.Tensor,
    narrow: Narrow,
    *,
    gated: bool = False,
    residual: torch.Tensor | None = None,
    pdl: bool = False,
) -> torch.Tensor:
    """Adds the adapter of the row to a product's y [1, out_features], in place.

    `gated`: returns silu of the first half times the second; with `residual` [1, out_features] the sum is added to it
    and it is returned.
    """
    weights = narrow.weights
    out_features, num_tiles = sum(weights.sizes) // (2 if gated else 1), weights.column_tiles.size(1)
    assert y.size(1) == sum(weights.sizes)
    assert not gated or (len(weights.sizes) <= 2 and weights.sizes[0] % out_features == 0)
    out = y if residual is None else residual
    if gated:
        out = torch.empty((1, out_features), dtype=y.dtype, device=y.device)
    tuning = TUNING.here
    per_tile = COLUMNS // tuning.columns
    launch = {"launch_pdl": True} if pdl else {}
    _row_low_rank[(triton.cdiv(out_features, tuning.columns) if gated else num_tiles * per_tile,)](
        y,
        narrow.products,
        narrow.starts,
        weights.table,
        weights.column_tiles,
        out,
        weights.table.size(0),
        num_tiles,
        OUT=out_features,
        PROJECTIONS=len(weights.sizes),
        COLUMNS=tuning.columns,
        PER_TILE=per_tile,
        RANKS=tuning.ranks,
        WIDTH=triton.next_power_of_2(weights.table.size(0)),
        GATED=gated,
        ADD=residual is not None,
        PDL=pdl,
        num_warps=tuning.warps,
        **launch,
    )
    return out


def precompile_calls(shape: ModelShape) -> Calls:
    if shape.num_adapters and shape.runs_single_rows:
        for in_features, sizes in adapted_layers(shape):
            yield partial(_precompile_layer, shape, in_features, sizes)


def _precompile_layer(shape: ModelShape, in_features: int, sizes: tuple[int, ...]) -> None:
    """Compiles the product of one row with the first half of an adapter, and the second half."""
    weights, out, pdl = empty_table(shape, in_features, sizes), sum(sizes), HAS_PDL.here
    gated, last = len(sizes) == 2, sizes == (shape.hidden_size,)
    starts = AdaptedRows.none(1, shape.num_adapters).starts
    narrow = Narrow(weights, starts, shape.empty(weights.most_ranks))
    x, norm = shape.empty(1, in_features), None if last else RowNorm(shape.empty(in_features), 1e-6)
    if shape.packed is None:
        row_linear(x, LinearWeight(shape.empty(out, in_features), None), norm=norm, narrow=narrow, pdl=pdl)
    else:
        row_narrow_as_cut(x, narrow, norm, pdl=pdl)
    residual = shape.empty(1, out) if last and shape.is_whole else None
    row_low_rank(shape.empty(1, out), narrow, gated=gated, residual=residual, pdl=pdl)
