"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021), several of them in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_RANK = 256


@dataclass(frozen=True)
class LowRankAddition:
    """Weights of one adapter for one layer."""

    # Per projection of the layer: `down` [rank, in_features] and `up` [the projection's out_features, rank];
    # None for unchanged projections.
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
    # float32 [2, out_features of all]: factor of the layer's own outputs, and a term added to them afterwards
    # (DoRA, Liu et al. 2024; zeros if the pairs replace the layer); None: unchanged.
    gains: torch.Tensor | None = None


@dataclass(frozen=True)
class AdaptedRows:
    """Mapping of rows to adapters, int32, at fixed addresses that recordings read again at each replay."""

    starts: torch.Tensor  # [num_adapters + 1] bounds of each adapter's rows in `tokens`
    tokens: torch.Tensor  # [most rows] rows sorted by adapter
    numbers: torch.Tensor  # [most rows] adapters of the rows; only maintained on CPUs

    @property
    def count(self) -> torch.Tensor:
        """Number of rows with an adapter, [1]."""
        return self.starts[-1:]

    @property
    def num_adapters(self) -> int:
        return int(self.starts.size(0)) - 1

    @classmethod
    def none(cls, most: int, num_adapters: int) -> AdaptedRows:
        """Returns a mapping in which no row is adapted, with room for `most` rows."""
        return cls(*(torch.zeros(size, dtype=torch.int32) for size in (num_adapters + 1, most, most)))

    @classmethod
    def of(cls, numbers: torch.Tensor, num_adapters: int) -> AdaptedRows:
        """Builds the mapping from `numbers` int32 [num_rows]: the adapter of each row, or -1. No host
        synchronization."""
        keys, tokens = torch.where(numbers < 0, num_adapters, numbers).sort(stable=True)
        bounds = torch.arange(num_adapters + 1, dtype=keys.dtype, device=keys.device)
        return cls(torch.searchsorted(keys, bounds, out_int32=True), tokens.int(), keys)

    def of_rows(self, num_rows: int) -> torch.Tensor:
        """Returns the adapter of each of `num_rows` rows, or -1: int32 [num_rows]. No host synchronization."""
        place = torch.arange(min(num_rows, self.tokens.size(0)), dtype=torch.int32, device=self.tokens.device)
        found = torch.searchsorted(self.starts[1:], place, right=True, out_int32=True)
        tokens = torch.where(place < self.count, self.tokens[: len(place)], num_rows).long()
        numbers = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=place.device)
        return numbers.scatter_(0, tokens, found)[:num_rows]


@dataclass(frozen=True)
class ExpertAdditions:
    """Adapters of the two products of every expert of a layer."""

    # Weights by number * num_experts + expert, one adapter per pair of adapter and expert: of gates
    # and ups (two projections), and of the output.
    gate_up: Any
    down: Any
    rows: AdaptedRows  # tokens and their adapters


@dataclass(frozen=True)
class LowRankWeights:
    """Adapters of a layer by number. Opaque to callers: each package packs in its own way."""

    adapters: list[LowRankAddition | None]
    in_features: int
    sizes: tuple[int, ...]  # out_features of each projection


def prepare_low_rank(
    adapters: Sequence[LowRankAddition | None],
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    most_rank: int = MOST_RANK,
    device: torch.device | None = None,
) -> LowRankWeights:
    """Packs the adapters of a layer.

    `adapters`: by number; None: the layer is unchanged. All in `dtype`, that of x, on `device` (None: the CPU).
    `sizes`: out_features of the layer's projections, concatenated; `most_rank`: maximum of one.
    """
    weights = LowRankWeights([None] * len(adapters), in_features, tuple(sizes))
    for number, update in enumerate(adapters):
        put_low_rank(weights, number, update)
    return weights


def put_low_rank(weights: LowRankWeights, number: int, update: LowRankAddition | None) -> None:
    """Replaces the weights of the adapter `number`, one of those that `weights` were prepared for.

    Call between two steps; recordings use them from their next replay on.
    """
    for pair, size in zip(update.pairs if update else (), weights.sizes, strict=update is not None):
        assert pair is None or (pair[0].size(1), pair[1].size(0)) == (weights.in_features, size)
    weights.adapters[number] = update


def add_low_rank(x: torch.Tensor, result: torch.Tensor, weights: LowRankWeights, rows: AdaptedRows) -> None:
    """Adds (x @ down.T) @ up.T of each row's adapter to `result` [num_tokens, out_features of all projections].

    x: [num_tokens, in_features]. Gains are applied first. The low-rank product is rounded to x's dtype; sums are in
    float32 or better.
    """
    starts = rows.starts.tolist()
    parts = result.split(weights.sizes, dim=1)
    for update, start, end in zip(weights.adapters, starts, starts[1:], strict=False):
        if update is None or start == end:
            continue
        tokens = rows.tokens[start:end]
        of_adapter = x.index_select(0, tokens)
        _scale(result, tokens, update)
        for pair, part in zip(update.pairs, parts, strict=True):
            if pair is not None:
                down, up = pair
                part.index_add_(0, tokens, (of_adapter @ down.t()) @ up.t())


def embed_low_rank(ids: torch.Tensor, result: torch.Tensor, weights: LowRankWeights, rows: AdaptedRows) -> None:
    """Adds down[:, id] @ up.T to `result` [num_tokens, hidden_size] of an embedding, for `ids` int32 [num_tokens].

    The embedding is treated as a linear layer of one-hot rows; `in_features` is the vocabulary size. Gains are applied
    first.
    """
    starts = rows.starts.tolist()
    for update, start, end in zip(weights.adapters, starts, starts[1:], strict=False):
        if update is not None and update.pairs[0] is not None and start < end:
            tokens, (down, up) = rows.tokens[start:end], update.pairs[0]
            narrow = down.index_select(1, ids.index_select(0, tokens)).t()
            _scale(result, tokens, update)
            result.index_add_(0, tokens, narrow.to(result.dtype) @ up.t())


def _scale(result: torch.Tensor, tokens: torch.Tensor, update: LowRankAddition) -> None:
    """Multiplies the rows `tokens` of `result` by an adapter's gains and adds its offsets, in place; does nothing
    without gains."""
    if update.gains is not None:
        scaled = result.index_select(0, tokens).float() * update.gains[0] + update.gains[1]
        result.index_copy_(0, tokens.long(), scaled.to(result.dtype))
