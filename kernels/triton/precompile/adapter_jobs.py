"""The jobs of jobs.py that only workers with adapters have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from quire.kernels.reference.linear import LinearWeight
from quire.kernels.reference.low_rank import AdaptedRows, ExpertAdditions
from quire.kernels.triton.low_rank import CUTS, add_low_rank, embed_low_rank
from quire.kernels.triton.low_rank_table import LowRankTable, prepare_low_rank
from quire.kernels.triton.moe.expert_layers import StackedExperts, experts_in_tiles
from quire.kernels.triton.moe.grouped_linear import TILES, WIDE_TILE, Tile
from quire.kernels.triton.precompile.precompile import ExpertsShape, ModelShape
from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear, row_narrow_as_cut
from quire.kernels.triton.single_row.row_low_rank import row_low_rank
from quire.kernels.triton.single_row.row_narrow import Narrow

MOST_ROWS = 3072  # of a step in a graph


def adapter_jobs(model: ModelShape, pdl: Callable[[], bool]) -> Iterator[Callable[[], object]]:
    """`pdl`: whether the GPU has programmatic dependent launch. Nothing is computed: sizes are those of no tensor."""
    dtype = getattr(torch, model.dtype)
    hidden, q_size = model.hidden_size, model.num_q_heads * model.head_dim
    kv_size, gates = model.num_kv_heads * model.head_dim, model.intermediate_size
    layers = [
        (hidden, (q_size, kv_size, kv_size)),
        (q_size, (hidden,)),
        (hidden, (model.vocab_size,)),
        *([] if model.experts else [(hidden, (gates, gates)), (gates, (hidden,))]),
    ]

    def of(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    def table(in_features: int, sizes: tuple[int, ...]) -> LowRankTable:
        return prepare_low_rank([None] * model.num_adapters, in_features, sizes, dtype, device=torch.device("meta"))

    def of_rows(in_features: int, sizes: tuple[int, ...], count: int) -> None:
        rows = AdaptedRows.none(count, model.num_adapters)
        add_low_rank(of(count, in_features), of(count, sum(sizes)), table(in_features, sizes), rows)

    def of_vectors(count: int) -> None:
        rows, ids = AdaptedRows.none(count, model.num_adapters), torch.empty(count, dtype=torch.int32, device="meta")
        embed_low_rank(ids, of(count, hidden), table(model.vocab_size, (hidden,)), rows)

    def of_row(in_features: int, sizes: tuple[int, ...], *, gated: bool, last: bool) -> None:
        weights, out = table(in_features, sizes), sum(sizes)
        narrow = Narrow(weights, AdaptedRows.none(1, model.num_adapters).starts, of(weights.most_ranks))
        norm = None if last else RowNorm(of(in_features), 1e-6)
        if model.packed is None:
            weight = LinearWeight(of(out, in_features), None)
            row_linear(of(1, in_features), weight, norm=norm, narrow=narrow, pdl=pdl())
        else:
            row_narrow_as_cut(of(1, in_features), narrow, norm, pdl=pdl())
        residual = of(1, out) if last and model.is_whole else None
        row_low_rank(of(1, out), narrow, gated=gated, residual=residual, pdl=pdl())

    counts = [min(most, MOST_ROWS) for most in CUTS]
    for count in counts:
        yield lambda n=count: of_vectors(n)
    if model.experts is not None and not model.experts.gate.limit:
        yield from _expert_jobs(model, model.experts, counts)
    for in_features, sizes in layers:
        for count in counts:
            yield lambda f=in_features, s=sizes, n=count: of_rows(f, s, n)
        if model.single_row:
            gated, last = len(sizes) == 2, sizes == (hidden,)
            yield lambda f=in_features, s=sizes, gated=gated, last=last: of_row(f, s, gated=gated, last=last)


def _expert_jobs(model: ModelShape, shape: ExpertsShape, counts: Sequence[int]) -> Iterator[Callable[[], object]]:
    """`counts`: of tokens, one for each way to cut what adapters add."""
    dtype, hidden, size = getattr(torch, model.dtype), model.hidden_size, shape.intermediate_size
    num_experts, top_k, meta = shape.num_experts, shape.routing.top_k, torch.device("meta")

    def of(*sizes: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(sizes, dtype=dtype, device=meta)

    def table(in_features: int, sizes: tuple[int, ...]) -> LowRankTable:
        return prepare_low_rank([None] * model.num_adapters * num_experts, in_features, sizes, dtype, device=meta)

    def added(count: int) -> ExpertAdditions:
        starts, *others = (of(n, dtype=torch.int32) for n in (model.num_adapters + 1, count, count))
        return ExpertAdditions(table(hidden, (size, size)), table(size, (hidden,)), AdaptedRows(starts, *others))

    def of_tile(tile: Tile, count: int) -> None:
        weights = StackedExperts(
            of(num_experts, 2 * size, hidden), of(num_experts, hidden, size), None, None, shape.gate
        )
        ids, chances = of(count, top_k, dtype=torch.int32), of(count, top_k, dtype=torch.float32)
        load = of(num_experts, dtype=torch.int64)
        experts_in_tiles(of(count, hidden), ids, chances, weights, None, None, load, added(count), tile=tile)

    first, *others = [WIDE_TILE] if dtype.itemsize == 4 else TILES.values()
    for tile in others:
        yield lambda tile=tile: of_tile(tile, 1)
    for count in {max(1, count // top_k) for count in counts}:
        yield lambda count=count: of_tile(first, count)
