"""Low-rank adapters of a linear layer for all rows of a step in two launches, without host synchronization.

Rows are sorted by adapter. A tile is some rows of one adapter; the number of tiles is known to the device alone, so the
grid has its maximum size and programs without work end at once: a CUDA graph covers any mixture of adapters. Weight
addresses are read from a table in device memory, so adapters are loaded and unloaded without a new recording. The first
launch multiplies with `down`, split along the input features, so that a few rows use the whole GPU; the second adds
these parts and multiplies with `up`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.reference.low_rank import AdaptedRows
from quire.kernels.triton.attention.attention_tile import dot_precision
from quire.kernels.triton.low_rank_table import COLUMNS, NUM_WORDS, LowRankTable, prepare_low_rank, ranks_of, weight_at
from quire.kernels.triton.moe.grouped_linear import most_tiles
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, ints


@dataclass(frozen=True)
class LowRankCut:
    """Tile sizes of both products: rows, ranks and depth of a tile, splits of the features, warps."""

    rows: int  # of a tile
    ranks: int  # at a time
    depth: int  # input features at a time
    splits: int  # splits of the input features
    warps: int


@dataclass(frozen=True)
class LowRankTuning:
    """Tuning of adapters by the number of rows."""

    cuts: Mapping[int, LowRankCut]  # by maximum rows of a step; smallest first
    float32_depth: int  # replaces the cut's depth


# Derived, not measured: with few rows only bytes in flight count, so the input features are split until there
# are as many programs as multiprocessors; with many, tiles share their reads.
TUNING = ByCapability(
    {
        SM90: LowRankTuning(
            cuts={
                64: LowRankCut(16, 32, 128, 16, 4),
                512: LowRankCut(16, 32, 128, 8, 4),
                2048: LowRankCut(64, 64, 64, 4, 8),
                1 << 30: LowRankCut(64, 64, 64, 1, 8),
            },
            float32_depth=32,
        )
    }
)
MOST_GRAPH_ROWS = 3072  # maximum rows of a step in a graph


def cut_for(num_rows: int) -> LowRankCut:
    """Returns the tile sizes for this number of rows."""
    return next(cut for most, cut in TUNING.here.cuts.items() if num_rows <= most)


@triton.jit
def _tile(starts_ptr, tile, num_adapters, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Returns a tile's adapter (-1: no such tile), its first row among the sorted ones, and the end of the adapter's
    rows."""
    at = tl.arange(0, WIDTH)
    inside = at < num_adapters
    start = tl.load(starts_ptr + at, mask=inside, other=0)
    end = tl.load(starts_ptr + at + 1, mask=inside, other=0)
    count = (end - start + ROWS - 1) // ROWS
    last = tl.cumsum(count, 0)
    within = tile - (last - count)
    is_mine = (within >= 0) & (tile < last)
    number = tl.sum(tl.where(is_mine, at + 1, 0), 0) - 1
    first = tl.sum(tl.where(is_mine, start + within * ROWS, 0), 0)
    return number, first, tl.sum(tl.where(is_mine, end, 0), 0)


@triton.jit(do_not_specialize=["num_adapters", "num_projections", "num_rows"])
def _shrink(
    x_ptr,
    starts_ptr,
    tokens_ptr,
    table_ptr,
    narrow_ptr,
    x_stride,
    in_features,
    most_ranks,
    num_adapters,
    num_projections,
    num_rows,
    features_per_split,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    DEPTH: tl.constexpr,
    WIDTH: tl.constexpr,
    EVEN: tl.constexpr,
    SHARE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Multiplies rows with `down`; groups of SHARE rows have one row of x."""
    split = tl.program_id(0)
    number, first, end = _tile(starts_ptr, tl.program_id(1), num_adapters, ROWS, WIDTH)
    if number < 0:
        return
    ranks = ranks_of(table_ptr, number) * num_projections
    if ranks == 0:
        return
    down_ptr = weight_at(table_ptr, number, 0, x_ptr)
    row = tl.arange(0, ROWS)
    has_row = first + row < end
    token = tl.load(tokens_ptr + first + row, mask=has_row, other=0).to(tl.int64)
    at = tl.arange(0, DEPTH)
    begin = split * features_per_split
    stop = tl.minimum(begin + features_per_split, in_features)
    x_at = x_ptr + (token // SHARE)[:, None] * x_stride + at[None, :]
    to = narrow_ptr + (split.to(tl.int64) * num_rows + first + row)[:, None] * most_ranks
    for low in range(0, ranks, RANKS):
        rank = low + tl.arange(0, RANKS)
        has_rank = rank < ranks
        down_at = down_ptr + rank[None, :].to(tl.int64) * in_features + at[:, None]
        sums = tl.zeros([ROWS, RANKS], tl.float32)
        for start in range(begin, stop, DEPTH):
            if EVEN:
                x = tl.load(x_at + start, mask=has_row[:, None], other=0.0)
                down = tl.load(down_at + start, mask=has_rank[None, :], other=0.0)
            else:
                inside = start + at < stop
                x = tl.load(x_at + start, mask=has_row[:, None] & inside[None, :], other=0.0)
                down = tl.load(down_at + start, mask=has_rank[None, :] & inside[:, None], other=0.0)
            sums = tl.dot(x, down, sums, input_precision=PRECISION)
        tl.store(to + rank[None, :], sums, mask=has_row[:, None] & has_rank[None, :])


@triton.jit(do_not_specialize=["num_adapters"])
def _pick(
    ids_ptr,
    starts_ptr,
    tokens_ptr,
    table_ptr,
    like_ptr,
    narrow_ptr,
    in_features,
    most_ranks,
    num_adapters,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Gathers the columns of `down` at token ids, as _shrink() for one-hot rows; `like_ptr`: any pointer to the
    weights' type."""
    number, first, end = _tile(starts_ptr, tl.program_id(0), num_adapters, ROWS, WIDTH)
    if number < 0:
        return
    ranks = ranks_of(table_ptr, number)
    if ranks == 0:
        return
    down_ptr = weight_at(table_ptr, number, 0, like_ptr)
    row = tl.arange(0, ROWS)
    has_row = first + row < end
    token = tl.load(tokens_ptr + first + row, mask=has_row, other=0).to(tl.int64)
    column = tl.load(ids_ptr + token, mask=has_row, other=0).to(tl.int64)
    to = narrow_ptr + (first + row).to(tl.int64)[:, None] * most_ranks
    for low in range(0, ranks, RANKS):
        rank = low + tl.arange(0, RANKS)
        inside = has_row[:, None] & (rank < ranks)[None, :]
        picked = tl.load(down_ptr + rank[None, :].to(tl.int64) * in_features + column[:, None], mask=inside, other=0.0)
        tl.store(to + rank[None, :], picked.to(tl.float32), mask=inside)


@triton.jit(do_not_specialize=["num_adapters", "num_rows", "num_column_tiles"])
def _expand(
    narrow_ptr,
    starts_ptr,
    tokens_ptr,
    table_ptr,
    column_tiles_ptr,
    result_ptr,
    result_stride,
    most_ranks,
    num_adapters,
    num_rows,
    num_column_tiles,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Adds up the splits of `narrow`, multiplies with `up` and adds to a tile of the result, gains first."""
    number, first, end = _tile(starts_ptr, tl.program_id(1), num_adapters, ROWS, WIDTH)
    if number < 0:
        return
    ranks = ranks_of(table_ptr, number)
    if ranks == 0:
        return
    up_ptr = weight_at(table_ptr, number, 1, result_ptr)
    part = tl.program_id(0)
    projection = tl.load(column_tiles_ptr + part)
    first_column = tl.load(column_tiles_ptr + num_column_tiles + part)
    last_column = tl.load(column_tiles_ptr + 2 * num_column_tiles + part)
    if ALIGNED:
        first_column, last_column = tl.multiple_of(first_column, 16), tl.multiple_of(last_column, 16)
    column = first_column + tl.arange(0, COLUMNS)
    has_column = column < last_column
    row = tl.arange(0, ROWS)
    has_row = first + row < end
    token = tl.load(tokens_ptr + first + row, mask=has_row, other=0).to(tl.int64)
    inside = has_row[:, None] & has_column[None, :]
    to = result_ptr + token[:, None] * result_stride + column[None, :]
    narrow_at = narrow_ptr + (first + row).to(tl.int64)[:, None] * most_ranks + projection * ranks
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for low in tl.range(0, ranks, RANKS, num_stages=1):
        rank = low + tl.arange(0, RANKS)
        has_rank = rank < ranks
        narrow = tl.zeros([ROWS, RANKS], tl.float32)
        for split in tl.static_range(SPLITS):
            of_split = narrow_at + split * num_rows.to(tl.int64) * most_ranks
            narrow += tl.load(of_split + rank[None, :], mask=has_row[:, None] & has_rank[None, :], other=0.0)
        up_at = up_ptr + column[None, :].to(tl.int64) * ranks + rank[:, None]
        up = tl.load(up_at, mask=has_column[None, :] & has_rank[:, None], other=0.0)
        sums = tl.dot(narrow.to(result_ptr.dtype.element_ty), up, sums, input_precision=PRECISION)
    old = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    gains = tl.load(table_ptr + number * NUM_WORDS + 3)
    if gains != 0:
        size = tl.load(column_tiles_ptr + 3 * num_column_tiles - 1)
        gains_at = gains.to(tl.pointer_type(tl.float32)) + column
        old *= tl.load(gains_at, mask=has_column, other=0.0)[None, :]
        old += tl.load(gains_at + size, mask=has_column, other=0.0)[None, :]
    tl.store(to, (old + sums).to(result_ptr.dtype.element_ty), mask=inside)


def add_low_rank(
    x: torch.Tensor, result: torch.Tensor, weights: LowRankTable, rows: AdaptedRows, *, share: int = 1
) -> None:
    """Adds each row's low-rank product to `result` [num_rows, out_features] in place, gains first, in two launches.
    `share`: consecutive rows of the result that have one row of x [num_rows / share, in_features] in common."""
    add_low_rank_cut(x, result, weights, rows, cut=cut_for(result.size(0)), share=share)


def add_low_rank_cut(
    x: torch.Tensor,
    result: torch.Tensor,
    weights: LowRankTable,
    rows: AdaptedRows,
    *,
    cut: LowRankCut,
    share: int = 1,
) -> None:
    """Adds the adapters' products as add_low_rank(), with the tile sizes `cut`; `rows` may have capacity for more rows
    than x has."""
    num_rows, in_features = result.size(0), x.size(1)
    if not num_rows:
        return
    assert x.stride(1) == 1
    assert (num_rows, in_features) == (x.size(0) * share, weights.in_features)
    num_adapters = rows.num_adapters
    depth = TUNING.here.float32_depth if x.element_size() == 4 else cut.depth
    per_split = triton.cdiv(triton.cdiv(in_features, depth), cut.splits) * depth
    splits = triton.cdiv(in_features, per_split)
    narrow = torch.empty((splits, num_rows, weights.most_ranks), dtype=torch.float32, device=x.device)
    tiles = most_tiles(num_rows, num_adapters, cut.rows)
    _shrink[(splits, tiles)](
        x,
        rows.starts,
        rows.tokens,
        weights.table,
        narrow,
        x.stride(0),
        in_features,
        weights.most_ranks,
        num_adapters,
        len(weights.sizes),
        num_rows,
        per_split,
        ROWS=cut.rows,
        RANKS=cut.ranks,
        DEPTH=depth,
        WIDTH=triton.next_power_of_2(num_adapters),
        EVEN=in_features % depth == 0,
        SHARE=share,
        PRECISION=dot_precision(x.element_size()),
        num_warps=cut.warps,
    )
    _launch_expand(narrow, result, weights, rows, cut)


def embed_low_rank(ids: torch.Tensor, result: torch.Tensor, weights: LowRankTable, rows: AdaptedRows) -> None:
    """Adds each row's low-rank embedding of `ids` int32 [num_rows] to `result` [num_rows, hidden_size] in place, gains
    first, in two launches."""
    num_rows = ids.size(0)
    if not num_rows:
        return
    assert len(weights.sizes) == 1
    cut, num_adapters = cut_for(num_rows), rows.num_adapters
    narrow = torch.empty((1, num_rows, weights.most_ranks), dtype=torch.float32, device=result.device)
    _pick[(most_tiles(num_rows, num_adapters, cut.rows),)](
        ids,
        rows.starts,
        rows.tokens,
        weights.table,
        result,
        narrow,
        weights.in_features,
        weights.most_ranks,
        num_adapters,
        ROWS=cut.rows,
        RANKS=cut.ranks,
        WIDTH=triton.next_power_of_2(num_adapters),
        num_warps=cut.warps,
    )
    _launch_expand(narrow, result, weights, rows, cut)


def _launch_expand(
    narrow: torch.Tensor, result: torch.Tensor, weights: LowRankTable, rows: AdaptedRows, cut: LowRankCut
) -> None:
    """Launches the second product; `narrow` float32 [splits, num_rows, most_ranks], by sorted row."""
    splits, num_rows, _ = narrow.shape
    assert result.stride(1) == 1
    assert result.size(1) == sum(weights.sizes)
    num_column_tiles = weights.column_tiles.size(1)
    _expand[(num_column_tiles, most_tiles(num_rows, rows.num_adapters, cut.rows))](
        narrow,
        rows.starts,
        rows.tokens,
        weights.table,
        weights.column_tiles,
        result,
        result.stride(0),
        weights.most_ranks,
        rows.num_adapters,
        num_rows,
        num_column_tiles,
        ROWS=cut.rows,
        RANKS=cut.ranks,
        COLUMNS=COLUMNS,
        SPLITS=splits,
        WIDTH=triton.next_power_of_2(rows.num_adapters),
        ALIGNED=all(size % 16 == 0 for size in weights.sizes),
        PRECISION=dot_precision(result.element_size()),
        num_warps=cut.warps,
    )


def graph_counts() -> list[int]:
    """Returns the row counts of graphs, one for each cut."""
    return [min(most, MOST_GRAPH_ROWS) for most in TUNING.here.cuts]


def adapted_layers(shape: ModelShape) -> list[tuple[int, tuple[int, ...]]]:
    """Returns the input features of the layers that adapters may change, and the output features of their
    projections."""
    hidden, gates, kv_size = shape.hidden_size, shape.intermediate_size, shape.num_kv_heads * shape.head_dim
    return [
        (hidden, (shape.q_size, kv_size, kv_size)),
        (shape.q_size, (hidden,)),
        (hidden, (shape.vocab_size,)),
        *([] if shape.experts else [(hidden, (gates, gates)), (gates, (hidden,))]),
    ]


def empty_table(shape: ModelShape, in_features: int, sizes: tuple[int, ...]) -> LowRankTable:
    """Returns a table without adapters on the meta device, for compiling kernels."""
    adapters = [None] * shape.num_adapters
    return prepare_low_rank(adapters, in_features, sizes, shape.torch_dtype, device=torch.device("meta"))


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the calls of the adapters' kernels for the row counts of decode graphs; none without adapters or
    batch-invariantly."""
    if not shape.num_adapters or shape.batch_invariant:
        return

    def add(in_features: int, sizes: tuple[int, ...], count: int) -> None:
        rows, table = AdaptedRows.none(count, shape.num_adapters), empty_table(shape, in_features, sizes)
        add_low_rank(shape.empty(count, in_features), shape.empty(count, sum(sizes)), table, rows)

    def embed(count: int) -> None:
        rows = AdaptedRows.none(count, shape.num_adapters)
        table = empty_table(shape, shape.vocab_size, (shape.hidden_size,))
        embed_low_rank(ints(count), shape.empty(count, shape.hidden_size), table, rows)

    for count in graph_counts():
        yield partial(embed, count)
        for in_features, sizes in adapted_layers(shape):
            yield partial(add, in_features, sizes, count)
