"""Experts of many tokens: pairs by expert, two grouped products, the weighted sum by token. No host synchronization.

Pairs enter an expert's list in any order, which does not change results: a row of a product does not depend on its
position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.reference.low_rank import AdaptedRows, ExpertAdditions
from quire.kernels.routing import SILU, Gate
from quire.kernels.triton.activation import silu_mul
from quire.kernels.triton.low_rank import add_low_rank, graph_counts
from quire.kernels.triton.low_rank_table import LowRankTable, prepare_low_rank
from quire.kernels.triton.moe.grouped_linear import TUNING as GROUPED
from quire.kernels.triton.moe.grouped_linear import Grouping, Tile, grouped_linear, most_tiles, takes_tiles, tile_for
from quire.kernels.triton.precompile.shapes import ROWS, Calls, ExpertsShape, ModelShape, floats, ints, longs


@dataclass(frozen=True)
class ExpertsTuning:
    """Work per program of the kernels around the products."""

    pairs: int
    tiles: int
    most_columns: int  # maximum columns of a token's sum per program
    warps: int


TUNING = ByCapability({SM90: ExpertsTuning(pairs=256, tiles=16, most_columns=1024, warps=4)})


@dataclass(frozen=True)
class StackedExperts:
    """Expert weights as in quire.kernels.reference.ExpertsWeight, dense."""

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    gate: Gate

    @property
    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """Tensors with experts as first dimension, which together hold everything of an expert."""
        return tuple(each for each in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if each is not None)


def prepare_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: Gate = SILU,
) -> StackedExperts:
    """Makes the weights dense; nothing is repacked. Shapes as in the reference."""
    return StackedExperts(gate_up.contiguous(), down.contiguous(), gate_up_bias, down_bias, gate)


@triton.jit(do_not_specialize=["num_pairs", "table_width"])
def _list_pairs(ids_ptr, counts_ptr, table_ptr, num_pairs, table_width, PAIRS: tl.constexpr):
    """Appends every pair with an expert to that expert's list, in any order, and counts it."""
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    inside = pair < num_pairs
    expert = tl.load(ids_ptr + pair, mask=inside, other=-1)
    inside = expert >= 0
    place = tl.atomic_add(counts_ptr + expert, 1, mask=inside, sem="relaxed")
    tl.store(table_ptr + expert.to(tl.int64) * table_width + place, pair, mask=inside)


@triton.jit(do_not_specialize=["num_tiles"])
def _cut_tiles(
    counts_ptr,
    load_ptr,
    tiles_ptr,
    num_tiles,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    TILES: tl.constexpr,
):
    """Lists the tiles of all experts in order, TILES per program; adds the lists' lengths to the load."""
    at = tl.arange(0, WIDTH)
    inside = at < EXPERTS
    count = tl.load(counts_ptr + at, mask=inside, other=0)
    if load_ptr is not None:  # noqa: SIM102 - one is known by the type of an argument, the other by its value
        if tl.program_id(0) == 0:
            tl.store(load_ptr + at, tl.load(load_ptr + at, mask=inside, other=0) + count, mask=inside)
    ends = tl.cumsum((count + ROWS - 1) // ROWS, 0)
    starts = ends - (count + ROWS - 1) // ROWS
    tile = tl.program_id(0) * TILES + tl.arange(0, TILES)
    is_mine = (tile[:, None] >= starts[None, :]) & (tile[:, None] < ends[None, :])
    expert = tl.sum(tl.where(is_mine, at[None, :] + 1, 0), 1) - 1
    first = (tile - tl.sum(tl.where(is_mine, starts[None, :], 0), 1)) * ROWS
    left = tl.minimum(tl.sum(tl.where(is_mine, count[None, :], 0), 1) - first, ROWS)
    kept = tile < num_tiles
    tl.store(tiles_ptr + tile, expert, mask=kept)
    tl.store(tiles_ptr + num_tiles + tile, first, mask=kept)
    tl.store(tiles_ptr + 2 * num_tiles + tile, left, mask=kept)


def group(ids: torch.Tensor, num_experts: int, load: torch.Tensor | None, tile: Tile) -> Grouping:
    """Groups pairs by expert into tiles of `tile.rows` rows; ids int32 [num_tokens, top_k], -1 is skipped. Adds each
    expert's tokens to `load` int64 [num_experts]."""
    num_pairs, device, tuning = ids.numel(), ids.device, TUNING.here
    counts = torch.zeros(num_experts, dtype=torch.int32, device=device)
    table = torch.empty((num_experts, ids.size(0)), dtype=torch.int32, device=device)
    num_tiles = most_tiles(num_pairs, num_experts, tile.rows)
    tiles = torch.empty((3, num_tiles), dtype=torch.int32, device=device)
    _list_pairs[(triton.cdiv(num_pairs, tuning.pairs),)](
        ids, counts, table, num_pairs, table.size(1), PAIRS=tuning.pairs, num_warps=tuning.warps
    )
    _cut_tiles[(triton.cdiv(num_tiles, tuning.tiles),)](
        counts,
        load,
        tiles,
        num_tiles,
        EXPERTS=num_experts,
        WIDTH=triton.next_power_of_2(num_experts),
        ROWS=tile.rows,
        TILES=tuning.tiles,
        num_warps=tuning.warps,
    )
    return Grouping(tiles, table, tile)


@triton.jit
def _add_up(
    made_ptr,
    ids_ptr,
    weights_ptr,
    shared_ptr,
    shared_gate_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Adds up a token's weighted expert outputs and the shared expert's, for COLUMNS columns."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = at < SIZE
    out = tl.zeros([COLUMNS], tl.float32)
    for k in tl.static_range(TOP_K):
        size = tl.where(tl.load(ids_ptr + token * TOP_K + k) >= 0, SIZE, 0)
        made = tl.load(made_ptr + (token * TOP_K + k) * SIZE + at, mask=at < size, other=0.0).to(tl.float32)
        out += made * tl.load(weights_ptr + token * TOP_K + k)
    if shared_ptr is not None:
        shared = tl.load(shared_ptr + token * SIZE + at, mask=inside, other=0.0).to(tl.float32)
        if shared_gate_ptr is not None:
            shared *= tl.sigmoid(tl.load(shared_gate_ptr + token).to(tl.float32))
        out += shared
    tl.store(out_ptr + token * SIZE + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: StackedExperts,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    added: ExpertAdditions | None = None,
) -> torch.Tensor:
    """Computes each token's weighted sum of its experts' outputs, [num_tokens, hidden_size] -> the same shape, and adds
    to `load`, in tiles chosen by the number of pairs."""
    tile = tile_for(ids.numel(), packed.down.size(0), x.element_size())
    return experts_in_tiles(x, ids, weights, packed, shared, shared_gate, load, added, tile=tile)


def _adapted(
    x: torch.Tensor,
    ids: torch.Tensor,
    packed: StackedExperts,
    grouping: Grouping,
    added: ExpertAdditions,
    **options: object,
) -> torch.Tensor:
    """Computes the experts' outputs with LoRA adapters, before they are weighted: x [num_tokens, hidden_size], ids
    [num_tokens, top_k] -> [num_tokens * top_k, hidden_size], in the order of `ids`; rows of pairs without an expert
    (id -1) hold anything.

    The gate is applied by a kernel of its own, since adapters add to its input; only SiLU without a limit.
    `options`: as in experts_in_tiles().
    """
    assert not packed.gate.limit
    num_pairs, share, num_experts = ids.numel(), ids.size(1), packed.down.size(0)
    numbers = added.rows.of_rows(ids.size(0)).unsqueeze(1)
    keys = torch.where((numbers < 0) | (ids < 0), -1, numbers * num_experts + ids).flatten()
    pairs = AdaptedRows.of(keys, added.rows.num_adapters * num_experts)
    gate_up = grouped_linear(x, packed.gate_up, packed.gate_up_bias, grouping, num_pairs, share=share, **options)
    add_low_rank(x, gate_up, added.gate_up, pairs, share=share)
    gated = silu_mul(gate_up)
    made = grouped_linear(gated, packed.down, packed.down_bias, grouping, num_pairs, **options)
    add_low_rank(gated, made, added.down, pairs)
    return made


def experts_in_tiles(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: StackedExperts,
    shared: torch.Tensor | None,
    shared_gate: torch.Tensor | None,
    load: torch.Tensor | None,
    added: ExpertAdditions | None = None,
    *,
    tile: Tile,
    **options: object,
) -> torch.Tensor:
    """Computes experts() with the tile sizes `tile`; returns a new tensor [num_tokens, hidden_size] and adds each
    expert's tokens to `load`. `options`: keyword arguments of Triton's launch of both products, such as
    enable_fp_fusion."""
    x, (num_tokens, size) = x.contiguous(), x.shape
    out = torch.empty_like(x)
    if not num_tokens:
        return out
    num_pairs, gate = ids.numel(), packed.gate
    grouping = group(ids, packed.down.size(0), load, tile)
    if added is None:
        in_tiles = takes_tiles(tile, packed.down)
        gated = grouped_linear(
            x, packed.gate_up, packed.gate_up_bias, grouping, num_pairs,
            gated=True, limit=gate.limit, alpha=gate.alpha, in_tiles=in_tiles, share=ids.size(1), **options,
        )  # fmt: skip
        made = grouped_linear(gated, packed.down, packed.down_bias, grouping, num_pairs, in_tiles=in_tiles, **options)
    else:
        made = _adapted(x, ids, packed, grouping, added, **options)
    columns = min(triton.next_power_of_2(size), TUNING.here.most_columns)
    _add_up[(num_tokens, triton.cdiv(size, columns))](
        made,
        ids,
        weights,
        shared,
        shared_gate,
        out,
        SIZE=size,
        TOP_K=ids.size(1),
        COLUMNS=columns,
        num_warps=TUNING.here.warps,
        **options,
    )
    return out


def layer_arguments(shape: ModelShape, experts: ExpertsShape) -> tuple[Any, ...]:
    """Returns the arguments of experts() except adapters, as tensors without memory, for compiling."""
    count, size, hidden = experts.num_experts, experts.intermediate_size, shape.hidden_size
    biases = (shape.empty(count, 2 * size), shape.empty(count, hidden)) if experts.biased else (None, None)
    packed = StackedExperts(
        shape.empty(count, 2 * size, hidden), shape.empty(count, hidden, size), *biases, experts.gate
    )
    top_k = experts.routing.top_k
    shared = shape.empty(ROWS, hidden) if experts.shared_is_there else None
    shared_gate = shape.empty(ROWS, 1) if experts.shared_is_gated else None
    return shape.empty(ROWS, hidden), ints(ROWS, top_k), floats(ROWS, top_k), packed, shared, shared_gate, longs(count)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the layer's calls for each tile size, with adapters if the model has them; none without experts or
    batch-invariantly."""
    if shape.experts is None or shape.batch_invariant:
        return
    tiles = [GROUPED.here.float32] if shape.torch_dtype.itemsize == 4 else [*GROUPED.here.tiles.values()]
    for tile in tiles:
        yield partial(experts_in_tiles, *layer_arguments(shape, shape.experts), tile=tile)
    if not shape.num_adapters or shape.experts.gate.limit:
        return
    first, *others = tiles
    for tile in others:
        yield partial(_precompile_adapted, shape, shape.experts, tile, 1)
    for count in {max(1, count // shape.experts.routing.top_k) for count in graph_counts()}:
        yield partial(_precompile_adapted, shape, shape.experts, first, count)


def _precompile_adapted(model: ModelShape, shape: ExpertsShape, tile: Tile, num_tokens: int) -> None:
    """Calls the layer with adapters, for `num_tokens` tokens on tensors without memory."""
    hidden, size, num_experts, top_k = (
        model.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.routing.top_k,
    )

    def table(in_features: int, sizes: tuple[int, ...]) -> LowRankTable:
        adapters = [None] * model.num_adapters * num_experts
        return prepare_low_rank(adapters, in_features, sizes, model.torch_dtype, device=torch.device("meta"))

    rows = AdaptedRows(*(ints(count) for count in (model.num_adapters + 1, num_tokens, num_tokens)))
    added = ExpertAdditions(table(hidden, (size, size)), table(size, (hidden,)), rows)
    gate_up, down = model.empty(num_experts, 2 * size, hidden), model.empty(num_experts, hidden, size)
    weights = StackedExperts(gate_up, down, None, None, shape.gate)
    chosen = ints(num_tokens, top_k), floats(num_tokens, top_k)
    x, load = model.empty(num_tokens, hidden), longs(num_experts)
    experts_in_tiles(x, *chosen, weights, None, None, load, added, tile=tile)
