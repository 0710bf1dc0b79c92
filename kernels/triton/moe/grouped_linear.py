"""Products of experts with their rows, in tiles of one expert's rows each.

A row is a pair of a token and one of its experts; `table` lists each expert's pairs, `tiles` gives each tile's expert
and its part of the list (both from expert_layers.py). The number of tiles with work is known to the device alone: the
grid has its maximum size, and programs without work end at once. So a CUDA graph can contain it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.attention.attention_tile import dot_precision


@dataclass(frozen=True)
class ProductCut:
    """Tile sizes of a product, except for rows."""

    columns: int  # of the result; for gates and ups this many of each
    depth: int  # input features at a time
    stages: int
    warps: int


@dataclass(frozen=True)
class Tile:
    """Tile sizes of an expert's two products: rows, columns and depth of each, and whether the copy engine (TMA) loads
    weights."""

    rows: int
    up: ProductCut  # and gates
    down: ProductCut
    copied: bool = False  # TMA copies for weights and for the rows between the products, which are then stored in tiles

    @classmethod
    def even(cls, rows: int, *cut: int, copied: bool = False) -> Tile:
        return cls(rows, ProductCut(*cut), ProductCut(*cut), copied)


@dataclass(frozen=True)
class GroupedTuning:
    """Tiles of grouped products."""

    tiles: Mapping[int, Tile]  # by maximum average rows per expert; smallest first
    float32: Tile  # for products without tensor cores


# Fastest of those that `python -m tools.bench.kernels.gpu expert_tiles` tries on an H200, with the sizes of
# Qwen3-30B-A3B. In us, and without the copy engine: 4 rows an expert
# 300 and 305 (261 are the bytes), 16 rows 318 and 333, 32 rows 340 and 379, 128 rows 480 and 609, 512 rows 1,243 and
# 1,492.
TUNING = ByCapability(
    {
        SM90: GroupedTuning(
            tiles={
                8: Tile.even(16, 64, 128, 4, 4, copied=True),
                20: Tile.even(32, 64, 128, 4, 4, copied=True),
                96: Tile(64, ProductCut(128, 64, 4, 8), ProductCut(128, 64, 3, 4), copied=True),
                1 << 30: Tile(128, ProductCut(128, 64, 4, 8), ProductCut(256, 64, 4, 8), copied=True),
            },
            float32=Tile.even(32, 32, 32, 2, 4),
        )
    }
)


def tile_for(num_pairs: int, num_experts: int, element_bytes: int) -> Tile:
    """Returns the tile sizes for the average number of pairs per expert; one tile for float32."""
    if element_bytes == 4:
        return TUNING.here.float32
    average = num_pairs / num_experts
    return next(tile for most, tile in TUNING.here.tiles.items() if average <= most)


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """Returns the maximum number of tiles for any distribution of pairs over experts."""
    return min(num_pairs, (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows)


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Applies quire.kernels.routing.Gate to gates and ups."""
    if LIMIT > 0:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * gate * tl.sigmoid(gate * ALPHA)
    else:
        return gate * tl.sigmoid(gate) * up


@triton.jit(do_not_specialize=["num_tiles", "table_width"])
def _grouped_linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    tiles_ptr,
    table_ptr,
    out_ptr,
    num_tiles,
    table_width,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    SHARE: tl.constexpr,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
    COPIED: tl.constexpr,
    FROM_TILES: tl.constexpr,
    TO_TILES: tl.constexpr,
):
    """Multiplies tiles of rows with their experts' weights.

    SHARE: pairs per row of x. GATED: a weight has 2 * OUT rows, gates first. COPIED: weight_ptr is a TMA descriptor.
    FROM_TILES: x_ptr is one, too, and x has ROWS rows per tile; TO_TILES: out has ROWS rows per tile.
    """
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first, count = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    row = tl.arange(0, ROWS)
    has_row = row < count
    # Rows past the last one repeat the tile's first, which is initialized; their results are not stored.
    pair = tl.load(table_ptr + expert.to(tl.int64) * table_width + first + tl.where(has_row, row, 0))
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_column = column < OUT
    at = tl.arange(0, DEPTH)
    # Columns past the last one repeat likewise: loads need no mask.
    read = tl.where(has_column, column, 0)
    HALVES: tl.constexpr = 2 if GATED else 1
    weight_row = expert.to(tl.int64) * (HALVES * OUT) + read
    first_row = expert * (HALVES * OUT) + tl.program_id(0) * COLUMNS
    if not FROM_TILES:
        x_at = x_ptr + (pair // SHARE).to(tl.int64)[:, None] * IN + at[None, :]
    if not COPIED:
        weight_at = weight_ptr + weight_row[None, :] * IN + at[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, IN, DEPTH, num_stages=STAGES):
        if COPIED:
            x = x_ptr.load([tile * ROWS, start]) if FROM_TILES else tl.load(x_at + start)
            sums = tl.dot(x, tl.trans(weight_ptr.load([first_row, start])), sums, input_precision=PRECISION)
            if GATED:
                up = weight_ptr.load([first_row + OUT, start])
                ups = tl.dot(x, tl.trans(up), ups, input_precision=PRECISION)
        elif IN % DEPTH == 0:
            x = tl.load(x_at + start)
            weight = tl.load(weight_at + start)
            sums = tl.dot(x, weight, sums, input_precision=PRECISION)
            if GATED:
                up = tl.load(weight_at + OUT * IN + start)
                ups = tl.dot(x, up, ups, input_precision=PRECISION)
        else:
            inside = start + at < IN
            x = tl.load(x_at + start, mask=inside[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=inside[:, None], other=0.0)
            sums = tl.dot(x, weight, sums, input_precision=PRECISION)
            if GATED:
                up = tl.load(weight_at + OUT * IN + start, mask=inside[:, None], other=0.0)
                ups = tl.dot(x, up, ups, input_precision=PRECISION)
    if bias_ptr is not None:
        sums += tl.load(bias_ptr + weight_row)[None, :].to(tl.float32)
        if GATED:
            ups += tl.load(bias_ptr + weight_row + OUT)[None, :].to(tl.float32)
    if GATED:
        sums = activate(sums, ups, LIMIT, ALPHA)
    if TO_TILES:  # all rows: padding rows are multiplied as well
        to = out_ptr + (tile.to(tl.int64) * ROWS + row)[:, None] * OUT + column[None, :]
        tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=has_column[None, :])
    else:
        to = out_ptr + pair.to(tl.int64)[:, None] * OUT + column[None, :]
        tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@dataclass(frozen=True)
class Grouping:
    """Assignment of pairs to tiles and experts, computed by expert_layers.group()."""

    tiles: torch.Tensor  # int32 [3, num_tiles]: expert or -1, start in its list of pairs, number of pairs
    table: torch.Tensor  # int32 [num_experts, maximum pairs of an expert]
    tile: Tile


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    grouping: Grouping,
    num_pairs: int,
    *,
    gated: bool = False,
    limit: float = 0.0,
    alpha: float = 1.0,
    in_tiles: bool = False,
    share: int = 1,
    **options: object,
) -> torch.Tensor:
    """Multiplies x [num_pairs / share, in_features] with weight [num_experts, out_features, in_features].

    Returns [num_pairs, out_features]; `gated`: half as many features, after the gate. `in_tiles`: the intermediate rows
    are stored for whole tiles, including padding: as the result of the first (gated) product and x of the second.
    `options`: of the compiler.
    """
    tile, halves = grouping.tile, 2 if gated else 1
    cut = tile.up if gated else tile.down
    out_features, in_features = weight.size(1) // halves, weight.size(2)
    num_tiles = grouping.tiles.size(1)
    out = x.new_empty((num_tiles * tile.rows if in_tiles and gated else num_pairs, out_features))
    copied = tile.copied and in_features % cut.depth == 0
    from_tiles = in_tiles and not gated
    assert copied or not from_tiles, "rows in tiles are read by the copy engine"
    _grouped_linear[(triton.cdiv(out_features, cut.columns), num_tiles)](
        TensorDescriptor.from_tensor(x, [tile.rows, cut.depth]) if from_tiles else x,
        TensorDescriptor.from_tensor(weight.view(-1, in_features), [cut.columns, cut.depth]) if copied else weight,
        bias,
        grouping.tiles,
        grouping.table,
        out,
        num_tiles,
        grouping.table.size(1),
        IN=in_features,
        OUT=out_features,
        SHARE=share,
        GATED=gated,
        LIMIT=limit,
        ALPHA=alpha,
        ROWS=tile.rows,
        COLUMNS=cut.columns,
        DEPTH=cut.depth if in_features % cut.depth == 0 else cut.depth // 2,
        STAGES=cut.stages,
        PRECISION=dot_precision(x.element_size()),
        COPIED=copied,
        FROM_TILES=from_tiles,
        TO_TILES=in_tiles and gated,
        num_warps=cut.warps,
        num_stages=cut.stages,
        **options,
    )
    return out


def takes_tiles(tile: Tile, down: torch.Tensor) -> bool:
    """Returns whether the intermediate rows can be stored in tiles, which the second product reads by TMA."""
    return tile.copied and down.element_size() == 2 and down.size(2) % tile.down.depth == 0
