"""First product of an adapter for one row: x times the adapter's `down`.

It runs in the launch of the layer's product (row_linear.py), or in its own if that reads weights in another format.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.low_rank_table import LowRankTable, adapter_of_row, weight_at
from quire.kernels.triton.pdl import launch_dependents, wait_for_inputs


@dataclass(frozen=True)
class RowNorm:
    """RMS norm of the row before the product."""

    weight: torch.Tensor
    eps: float


@dataclass(frozen=True)
class Narrow:
    """Adapters of a layer, the mapping of the row to one of them, and memory for the products of x with its `down`."""

    weights: LowRankTable
    starts: torch.Tensor  # of AdaptedRows
    products: torch.Tensor  # [weights.most_ranks] destination


@triton.jit
def chunk_of(x_ptr, norm_ptr, at, NORM: tl.constexpr):
    """Returns x and x * norm weight in float32."""
    x = tl.load(x_ptr + at).to(tl.float32)
    return x, x * tl.load(norm_ptr + at).to(tl.float32) if NORM else x


@triton.jit
def narrow_of_row(
    x_ptr,
    norm_ptr,
    starts_ptr,
    table_ptr,
    narrow_ptr,
    eps,
    num_adapters,
    num_projections,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Multiplies x with some rows of its adapter's `down`, if it has that many."""
    number, ranks = adapter_of_row(starts_ptr, table_ptr, num_adapters, WIDTH)
    rank = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = rank < ranks * num_projections
    at = tl.arange(0, CHUNK)
    source = weight_at(table_ptr, number, 0, narrow_ptr) + rank.to(tl.int64)[:, None] * IN + at[None, :]
    if PDL:
        launch_dependents()
    down = tl.load(source, mask=inside[:, None], other=0.0)
    if PDL:
        wait_for_inputs()
    x, scaled = chunk_of(x_ptr, norm_ptr, at, NORM)
    squares, sums = x * x, down.to(tl.float32) * scaled[None, :]
    for start in range(CHUNK, IN, CHUNK):
        down = tl.load(source + start, mask=inside[:, None], other=0.0)
        x, scaled = chunk_of(x_ptr, norm_ptr, start + at, NORM)
        squares, sums = squares + x * x, sums + down.to(tl.float32) * scaled[None, :]
    y = tl.sum(sums, 1)
    if NORM:
        y *= tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    tl.store(narrow_ptr + rank, y.to(narrow_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["eps", "num_adapters", "num_projections"])
def _row_narrow(
    x_ptr,
    norm_ptr,
    starts_ptr,
    table_ptr,
    narrow_ptr,
    eps,
    num_adapters,
    num_projections,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Computes narrow_of_row() for ROWS rows in a launch of its own."""
    narrow_of_row(
        x_ptr, norm_ptr, starts_ptr, table_ptr, narrow_ptr, eps, num_adapters, num_projections,
        IN, ROWS, CHUNK, NORM, PDL, WIDTH,
    )  # fmt: skip


def row_narrow(
    x: torch.Tensor, narrow: Narrow, norm: RowNorm | None, *, rows: int, chunk: int, warps: int, pdl: bool = False
) -> None:
    """Computes narrow.products, x [1, in_features] times the adapter's `down`, with x normalized if `norm` is given; a
    row without an adapter computes nothing. `rows`: of `down` per program; `chunk`: elements of a row at a time."""
    weights = narrow.weights
    launch = {"launch_pdl": True} if pdl else {}
    _row_narrow[(triton.cdiv(weights.most_ranks, rows),)](
        x,
        None if norm is None else norm.weight,
        narrow.starts,
        weights.table,
        narrow.products,
        0.0 if norm is None else norm.eps,
        weights.table.size(0),
        len(weights.sizes),
        IN=weights.in_features,
        ROWS=rows,
        CHUNK=chunk,
        NORM=norm is not None,
        PDL=pdl,
        WIDTH=triton.next_power_of_2(weights.table.size(0)),
        num_warps=warps,
        **launch,
    )
