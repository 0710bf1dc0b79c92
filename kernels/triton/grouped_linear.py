"""Products of experts with the rows that chose them, in tiles of one expert's rows each.

A row is a pair of a token and one of its experts; `table` lists an expert's pairs, `tiles` says for each tile whose it
is and which part of the list it takes (expert_layers.py makes both). How many tiles have work is known to the device
alone: the grid is as large as it can become, and programs without work end at once. So a CUDA graph can hold it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.triton.attention_tile import dot_precision


@dataclass(frozen=True)
class Tile:
    """How the products are cut up."""

    rows: int  # of a tile
    columns: int  # of the result; where gates and ups are computed, so many of each
    depth: int  # input features at a time
    stages: int
    warps: int


# By how many rows an expert has on average, at most (`python -m kernels.bench.gpu expert_tiles` on an H200). Few rows,
# chosen by reasoning: bytes of weights in flight are all that counts, two or three programs of 75 to 85 KB on each
# multiprocessor; an expert's rows fit in one tile as a rule, so that its weights are read once. Many rows, with the
# sizes of Qwen3-30B-A3B: 128 an expert take 609 us in tiles of 64 and 644 in those of 128; 512 take 1,492 in tiles of
# 128 with four stages, 1,540 with three, 1,705 in tiles of 64.
TILES = {
    8: Tile(16, 64, 128, 3, 4),
    20: Tile(32, 64, 128, 3, 4),
    96: Tile(64, 64, 64, 3, 4),
    192: Tile(64, 128, 64, 4, 4),
    1 << 30: Tile(128, 128, 64, 4, 8),
}
WIDE_TILE = Tile(32, 32, 32, 2, 4)  # float32, whose products no tensor core computes


def tile_for(num_pairs: int, num_experts: int, element_bytes: int) -> Tile:
    if element_bytes == 4:
        return WIDE_TILE
    average = num_pairs / num_experts
    return next(tile for most, tile in TILES.items() if average <= most)


def most_tiles(num_pairs: int, num_experts: int, rows: int) -> int:
    """That pairs can fall into, however they are spread over the experts."""
    return min(num_pairs, (num_pairs + min(num_experts, num_pairs) * (rows - 1)) // rows)


@triton.jit
def activate(gate, up, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """kernels.routing.Gate"""
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
):
    """SHARE: pairs that one row of x serves. GATED: a weight has 2 * OUT rows, gates first."""
    tile = tl.program_id(1)
    expert = tl.load(tiles_ptr + tile)
    if expert < 0:
        return
    first, count = tl.load(tiles_ptr + num_tiles + tile), tl.load(tiles_ptr + 2 * num_tiles + tile)
    row = tl.arange(0, ROWS)
    has_row = row < count
    pair = tl.load(table_ptr + expert.to(tl.int64) * table_width + first + row, mask=has_row, other=0)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    has_column = column < OUT
    at = tl.arange(0, DEPTH)
    # Rows and columns past the last one repeat another: what they give is not stored, and loads need no mask.
    read = tl.where(has_column, column, 0)
    HALVES: tl.constexpr = 2 if GATED else 1
    weight_row = expert.to(tl.int64) * (HALVES * OUT) + read
    x_at = x_ptr + (pair // SHARE).to(tl.int64)[:, None] * IN + at[None, :]
    weight_at = weight_ptr + weight_row[None, :] * IN + at[:, None]
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    ups = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, IN, DEPTH, num_stages=STAGES):
        if IN % DEPTH == 0:
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
    to = out_ptr + pair.to(tl.int64)[:, None] * OUT + column[None, :]
    tl.store(to, sums.to(out_ptr.dtype.element_ty), mask=has_row[:, None] & has_column[None, :])


@dataclass(frozen=True)
class Grouping:
    """Which rows meet which weight."""

    tiles: torch.Tensor  # int32 [3, num_tiles]: the expert or -1, where in its list of pairs, how many of them
    table: torch.Tensor  # int32 [num_experts, most pairs of one]
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
    **options: object,
) -> torch.Tensor:
    """x [num_pairs or num_tokens, in_features], weight [num_experts, out_features, in_features] -> [num_pairs,
    out_features]; `gated`: half as many, the gate's result. `options`: of the compiler."""
    halves, tile = 2 if gated else 1, grouping.tile
    out_features, in_features = weight.size(1) // halves, weight.size(2)
    num_tiles = grouping.tiles.size(1)
    out = torch.empty((num_pairs, out_features), dtype=x.dtype, device=x.device)
    _grouped_linear[(triton.cdiv(out_features, tile.columns), num_tiles)](
        x,
        weight,
        bias,
        grouping.tiles,
        grouping.table,
        out,
        num_tiles,
        grouping.table.size(1),
        IN=in_features,
        OUT=out_features,
        SHARE=num_pairs // x.size(0),
        GATED=gated,
        LIMIT=limit,
        ALPHA=alpha,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth if in_features % tile.depth == 0 else tile.depth // 2,
        STAGES=tile.stages,
        PRECISION=dot_precision(x.element_size()),
        num_warps=tile.warps,
        num_stages=tile.stages,
        **options,
    )
    return out
