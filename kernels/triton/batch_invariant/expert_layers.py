"""Experts with one tile size for any number of rows.

Pairs reach an expert in any order, tiles are full or not: a row's sums have the same order in the same instructions, as
in linear.py.
"""

from __future__ import annotations

import torch

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.reference.low_rank import ExpertAdditions
from quire.kernels.triton.moe.expert_layers import StackedExperts, experts_in_tiles, layer_arguments
from quire.kernels.triton.moe.grouped_linear import TUNING as GROUPED
from quire.kernels.triton.moe.grouped_linear import Tile
from quire.kernels.triton.precompile.shapes import Calls, ModelShape

TUNING = ByCapability({SM90: Tile.even(64, 64, 64, 3, 4)})


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
    """Computes each token's weighted sum of its experts' outputs, [num_tokens, hidden_size] -> the same shape, with one
    tile size for any number of tokens. Adapters are not supported."""
    assert added is None, "adapters have no place here"
    tile = GROUPED.here.float32 if x.element_size() == 4 else TUNING.here
    return experts_in_tiles(x, ids, weights, packed, shared, shared_gate, load, tile=tile, enable_fp_fusion=False)


def precompile_calls(shape: ModelShape) -> Calls:
    if shape.batch_invariant and shape.experts is not None:
        arguments = layer_arguments(shape, shape.experts)
        yield lambda: experts(*arguments)
