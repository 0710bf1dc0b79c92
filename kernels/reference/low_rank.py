"""What adapters of low rank add to a linear layer (LoRA, Hu et al. 2021), several of them in one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

MOST_RANK = 256


@dataclass(frozen=True)
class LowRankAddition:
    """Of one adapter and one layer."""

    # For each of the layer's projections: `down` [rank, in_features] and `up` [the projection's out_features, rank];
    # None where the adapter leaves it alone.
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor] | None]
    # float32 [2, out_features of all]: what the layer's own outputs are multiplied by, and what is added to them then
    # (DoRA, Liu et al. 2024; zeros where the pairs take the layer's place); None: nothing.
    gains: torch.Tensor | None = None


@dataclass(frozen=True)
class AdaptedRows:
    """Which rows go through which adapter. int32; memory that stays where it is, so that recordings read it anew."""

    starts: torch.Tensor  # [num_adapters + 1] where each adapter's begin in `tokens`, and where the last one's end
    tokens: torch.Tensor  # [most rows] rows, those of one adapter beside each other, adapters in their order
    numbers: torch.Tensor  # [most rows] their adapters; kept up where the CPU computes

    @property
    def count(self) -> torch.Tensor:
        """[1] how many have an adapter."""
        return self.starts[-1:]

    @property
    def num_adapters(self) -> int:
        return int(self.starts.size(0)) - 1

    @classmethod
    def none(cls, most: int, num_adapters: int) -> AdaptedRows:
        return cls(*(torch.zeros(size, dtype=torch.int32) for size in (num_adapters + 1, most, most)))

    @classmethod
    def of(cls, numbers: torch.Tensor, num_adapters: int) -> AdaptedRows:
        """`numbers` int32 [num_rows]: the adapter of each row, -1 where it has none. Nothing asks the host."""
        keys, tokens = torch.where(numbers < 0, num_adapters, numbers).sort(stable=True)
        bounds = torch.arange(num_adapters + 1, dtype=keys.dtype, device=keys.device)
        return cls(torch.searchsorted(keys, bounds, out_int32=True), tokens.int(), keys)

    def of_rows(self, num_rows: int) -> torch.Tensor:
        """int32 [num_rows] the adapter of each of so many rows, -1 where it has none. Nothing asks the host."""
        place = torch.arange(min(num_rows, self.tokens.size(0)), dtype=torch.int32, device=self.tokens.device)
        found = torch.searchsorted(self.starts[1:], place, right=True, out_int32=True)
        tokens = torch.where(place < self.count, self.tokens[: len(place)], num_rows).long()
        numbers = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=place.device)
        return numbers.scatter_(0, tokens, found)[:num_rows]


@dataclass(frozen=True)
class ExpertAdditions:
    """What adapters add to the two products of every expert of a layer."""

    # Of as many adapters as there are pairs of an adapter and an expert, number * num_experts + expert: to the gates
    # and ups, which are two projections, and to what comes out.
    gate_up: Any
    down: Any
    rows: AdaptedRows  # tokens and their adapters


@dataclass(frozen=True)
class LowRankWeights:
    """By adapter's number. Opaque to callers: each package packs in its own way."""

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
    """`adapters`: by number; None: it leaves the layer alone. All of `dtype`, which is that of x, on `device` (None:
    the CPU). `sizes`: out_features of the projections, which stand side by side in the layer; `most_rank`: of one."""
    weights = LowRankWeights([None] * len(adapters), in_features, tuple(sizes))
    for number, update in enumerate(adapters):
        put_low_rank(weights, number, update)
    return weights


def put_low_rank(weights: LowRankWeights, number: int, update: LowRankAddition | None) -> None:
    """Others for the adapter of that number, one of those that `weights` were prepared for. Recordings see them from
    their next replay on; between two steps only."""
    for pair, size in zip(update.pairs if update else (), weights.sizes, strict=update is not None):
        assert pair is None or (pair[0].size(1), pair[1].size(0)) == (weights.in_features, size)
    weights.adapters[number] = update


def add_low_rank(x: torch.Tensor, result: torch.Tensor, weights: LowRankWeights, rows: AdaptedRows) -> None:
    """Adds (x @ down.T) @ up.T of each projection to its part of `result` [num_tokens, out_features of all], of x
    [num_tokens, in_features], each row its own adapter's. The narrow product is rounded to x's dtype, sums are in
    float32 or better. Its gains come first."""
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
    """The same for an embedding, which is a linear layer of rows that are 1 at one place and 0 elsewhere: adds down[:,
    id] @ up.T to `result` [num_tokens, hidden_size], of `ids` int32 [num_tokens]. Its gains come first. `in_features`
    is the vocabulary."""
    starts = rows.starts.tolist()
    for update, start, end in zip(weights.adapters, starts, starts[1:], strict=False):
        if update is not None and update.pairs[0] is not None and start < end:
            tokens, (down, up) = rows.tokens[start:end], update.pairs[0]
            narrow = down.index_select(1, ids.index_select(0, tokens)).t()
            _scale(result, tokens, update)
            result.index_add_(0, tokens, narrow.to(result.dtype) @ up.t())


def _scale(result: torch.Tensor, tokens: torch.Tensor, update: LowRankAddition) -> None:
    """By its gains, in place."""
    if update.gains is not None:
        scaled = result.index_select(0, tokens).float() * update.gains[0] + update.gains[1]
        result.index_copy_(0, tokens.long(), scaled.to(result.dtype))
