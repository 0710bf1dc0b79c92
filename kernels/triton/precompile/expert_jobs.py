"""The jobs of jobs.py that only mixtures of experts have."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton import batch_invariant
from quire.kernels.triton.moe.expert_layers import StackedExperts, experts_in_tiles
from quire.kernels.triton.moe.grouped_linear import TILES, WIDE_TILE, Tile
from quire.kernels.triton.moe.routing import route
from quire.kernels.triton.precompile.precompile import ExpertsShape, ModelShape
from quire.kernels.triton.single_row.row_experts import row_experts
from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear

ROWS = 8


def expert_jobs(model: ModelShape, shape: ExpertsShape, pdl: Callable[[], bool]) -> Iterator[Callable[[], object]]:
    """`pdl`: whether the GPU has programmatic dependent launch. Weights are on the meta device: a layer's are large."""
    dtype = getattr(torch, model.dtype)

    def of(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    count, size, top_k = shape.num_experts, shape.intermediate_size, shape.routing.top_k
    gate_up, down = of(count, 2 * size, model.hidden_size), of(count, model.hidden_size, size)
    biases = (of(count, 2 * size), of(count, model.hidden_size)) if shape.biased else (None, None)
    packed = StackedExperts(gate_up, down, *biases, shape.gate)
    load, norm = of(count, dtype=torch.int64), RowNorm(of(model.hidden_size), 1e-6)
    x, ids, weights = (
        of(ROWS, model.hidden_size),
        of(ROWS, top_k, dtype=torch.int32),
        of(ROWS, top_k, dtype=torch.float32),
    )
    shared = of(ROWS, model.hidden_size) if shape.shared_is_there else None
    shared_gate = of(ROWS, 1) if shape.shared_is_gated else None
    logits = of(ROWS, count)

    def in_tiles(tile: Tile) -> None:
        experts_in_tiles(x, ids, weights, packed, shared, shared_gate, load, tile=tile)

    def choose() -> None:
        route(logits, shape.routing, of(count, dtype=torch.float32) if shape.choice_bias else None)

    if model.batch_invariant:
        yield lambda: batch_invariant.experts(x, ids, weights, packed, shared, shared_gate, load)
        yield lambda: batch_invariant.linear(x, LinearWeight(of(count, model.hidden_size), None))
    else:
        for tile in [WIDE_TILE] if dtype.itemsize == 4 else TILES.values():
            yield lambda tile=tile: in_tiles(tile)
    yield choose
    if model.single_row and shape.single_row and not model.batch_invariant:
        row, router = of(1, model.hidden_size), LinearWeight(of(count, model.hidden_size), None)
        yield lambda: row_experts(row, norm, logits[:1], shape.routing, packed, load, pdl=pdl())
        yield lambda: row_linear(row, router, norm=norm, pdl=pdl())
