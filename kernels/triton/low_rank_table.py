"""Table of adapter weights in device memory, so that adapters change without a new recording."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl

from quire.kernels.reference.low_rank import MOST_RANK, LowRankAddition
from quire.kernels.triton.attention.attention_tile import MIN_DOT

DOWN, UP, RANKS, GAINS = range(4)  # words of an adapter in the table
NUM_WORDS: tl.constexpr = tl.constexpr(4)
COLUMNS = 128  # columns of the result per program


@dataclass(frozen=True)
class LowRankTable:
    """Adapters of a layer.

    An adapter's rank is that of its largest projection, padded for matrix instructions; `down` has that many rows per
    projection, concatenated, `up` that many columns.
    """

    table: torch.Tensor  # int64 [num_adapters, NUM_WORDS]: addresses of down and up, ranks, address of gains; 0: none
    column_tiles: torch.Tensor  # int32 [3, tiles of the result]: projection, first column, end of the projection
    dtype: torch.dtype
    in_features: int
    sizes: tuple[int, ...]
    most_ranks: int  # over all projections
    owners: dict[int, tuple[object, ...]] = field(default_factory=dict)  # keep the memory of the addresses alive


def padded(rank: int) -> int:
    return triton.cdiv(rank, MIN_DOT) * MIN_DOT


def prepare_low_rank(
    adapters: Sequence[LowRankAddition | None],
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    most_rank: int = MOST_RANK,
    device: torch.device | None = None,
) -> LowRankTable:
    """Packs the adapters of a layer by number (None: unchanged) on `device`, padded to `most_rank`, with a table of
    addresses that kernels read."""
    tiles, row = [], 0
    for projection, size in enumerate(sizes):
        tiles += [(projection, first, row + size) for first in range(row, row + size, COLUMNS)]
        row += size
    weights = LowRankTable(
        torch.zeros(len(adapters), NUM_WORDS.value, dtype=torch.int64, device=device),
        torch.tensor(tiles, dtype=torch.int32).t().contiguous().to(device or "cpu"),
        dtype,
        in_features,
        tuple(sizes),
        len(sizes) * padded(most_rank),
    )
    for number, update in enumerate(adapters):
        if update is not None:
            put_low_rank(weights, number, update)
    return weights


def put_low_rank(weights: LowRankTable, number: int, update: LowRankAddition | None) -> None:
    """Replaces the weights of the adapter `number` in the table, in stream order, and drops the previous ones; graphs
    use the new ones from their next replay on. None removes the adapter."""
    words = [0] * NUM_WORDS.value
    is_there = update is not None and any(pair is not None for pair in update.pairs)
    if weights.owners.pop(number, None) is None and not is_there:
        return
    if update is not None and is_there:
        down, up = _packed(update, weights)
        gains = update.gains if update.gains is None else update.gains.contiguous()
        weights.owners[number] = (down, up, gains)
        words = [down.data_ptr(), up.data_ptr(), up.size(1), 0 if gains is None else gains.data_ptr()]
    weights.table[number].copy_(torch.tensor(words, dtype=torch.int64))


def _packed(update: LowRankAddition, weights: LowRankTable) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns `down` [projections * ranks, in_features] and `up` [out_features, ranks] of an adapter, its ranks padded
    with zeros."""
    ranks = padded(max(pair[0].size(0) for pair in update.pairs if pair is not None))
    assert ranks * len(weights.sizes) <= weights.most_ranks
    device, sizes = weights.table.device, weights.sizes
    down = torch.zeros(len(sizes), ranks, weights.in_features, dtype=weights.dtype, device=device)
    up = torch.zeros(sum(sizes), ranks, dtype=weights.dtype, device=device)
    for of_down, of_up, pair in zip(down, up.split(sizes), update.pairs, strict=True):
        if pair is not None:
            assert (pair[0].size(1), pair[1].size(0)) == (weights.in_features, of_up.size(0))
            of_down[: pair[0].size(0)] = pair[0]
            of_up[:, : pair[1].size(1)] = pair[1]
    return down.flatten(0, 1), up


@triton.jit
def ranks_of(table_ptr, number):
    """Returns the rank of an adapter's projections."""
    return tl.multiple_of(tl.load(table_ptr + number * NUM_WORDS + 2).to(tl.int32), 16)


@triton.jit
def adapter_of_row(starts_ptr, table_ptr, num_adapters, WIDTH: tl.constexpr):
    """Returns the adapter of a step's only row and its rank; 0 and 0 without an adapter."""
    at = tl.arange(0, WIDTH)
    inside = at < num_adapters
    start = tl.load(starts_ptr + at, mask=inside, other=0)
    end = tl.load(starts_ptr + at + 1, mask=inside, other=0)
    found = tl.sum(tl.where(end > start, at + 1, 0), 0)
    number = tl.maximum(found - 1, 0)
    return number, tl.multiple_of(tl.where(found > 0, ranks_of(table_ptr, number), 0), 16)


@triton.jit
def weight_at(table_ptr, number, WORD: tl.constexpr, like_ptr):
    """Returns the address in a word of an adapter as a pointer with the type of `like_ptr`."""
    address = tl.load(table_ptr + number * NUM_WORDS + WORD)
    return tl.multiple_of(address.to(tl.pointer_type(like_ptr.dtype.element_ty)), 16)
