"""What adapters of low rank add to a linear layer (LoRA, Hu et al. 2021), several of them in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

LowRankPair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class AdaptedRows:
    """Which rows go through which adapter. int32; memory that stays where it is, so that recordings read it anew."""

    count: torch.Tensor  # [1] how many have one
    tokens: torch.Tensor  # [most rows] which, those of one adapter beside each other
    numbers: torch.Tensor  # [most rows] their adapters

    @classmethod
    def none(cls, most: int) -> AdaptedRows:
        return cls(*(torch.zeros(size, dtype=torch.int32) for size in (1, most, most)))


@dataclass(frozen=True)
class LowRankWeights:
    """By adapter's number. Opaque to callers: each package packs in its own way."""

    pairs: list[LowRankPair | None]
    in_features: int
    out_features: int


def prepare_low_rank(
    pairs: Sequence[LowRankPair | None], in_features: int, out_features: int, dtype: torch.dtype
) -> LowRankWeights:
    """`pairs`: of one layer, by adapter's number: `down` [ranks, in_features] and `up` [out_features, ranks]; None: the
    adapter leaves the layer alone. All of `dtype`, which is that of x."""
    weights = LowRankWeights([None] * len(pairs), in_features, out_features)
    for number, pair in enumerate(pairs):
        put_low_rank(weights, number, pair)
    return weights


def put_low_rank(weights: LowRankWeights, number: int, pair: LowRankPair | None) -> None:
    """Another pair for the adapter of that number, one of those that `weights` were prepared for. Recordings see it
    from their next replay on; between two steps only."""
    assert pair is None or (pair[0].size(1), pair[1].size(0)) == (weights.in_features, weights.out_features)
    weights.pairs[number] = pair


def add_low_rank(x: torch.Tensor, result: torch.Tensor, weights: LowRankWeights, rows: AdaptedRows) -> None:
    """Adds (x @ down.T) @ up.T to `result` [num_tokens, out_features], of x [num_tokens, in_features], each row its
    own adapter's. The narrow product is rounded to x's dtype, sums are in float32 or better."""
    count = int(rows.count)
    numbers = rows.numbers[:count]
    for number in numbers.unique().tolist():
        pair = weights.pairs[number]
        if pair is not None:
            tokens = rows.tokens[:count][numbers == number]
            down, up = pair
            result.index_add_(0, tokens, (x.index_select(0, tokens) @ down.t()) @ up.t())
