"""Adapters on the compiled library (low_rank.cpp). Meaning, shapes and dtypes: kernels/reference/low_rank.py."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from quire.kernels import reference
from quire.kernels.cpu.functions import PackedWeight, dense, prepare_linear
from quire.kernels.cpu.native import DTYPES, LIBRARY, calls
from quire.kernels.reference.low_rank import MOST_RANK, AdaptedRows, LowRankAddition, LowRankWeights

Tensor = torch.Tensor
NUM_WORDS = 5  # words of LowRank in low_rank.cpp


@dataclass(frozen=True, slots=True)
class PackedLowRanks:
    """Adapters of a layer; `table` [num_adapters, NUM_WORDS] has addresses of down, up, spans and gains, and ranks; 0:
    none."""

    dtype: torch.dtype
    code: int
    in_features: int
    sizes: tuple[int, ...]
    table: Tensor
    owners: dict[int, tuple[object, ...]] = field(default_factory=dict)  # keep the memory of the addresses alive

    @property
    def out_features(self) -> int:
        return sum(self.sizes)


def prepare_low_rank(
    adapters: Sequence[LowRankAddition | None],
    in_features: int,
    sizes: Sequence[int],
    dtype: torch.dtype,
    *,
    most_rank: int = MOST_RANK,
    device: torch.device | None = None,
) -> PackedLowRanks | LowRankWeights:
    """Packs the adapters of a layer by number, None: unchanged, with a table of addresses that C reads. Other dtypes
    use the reference; `most_rank` and `device` are ignored."""
    code = DTYPES.get(dtype)
    if code is None:
        return reference.prepare_low_rank(adapters, in_features, sizes, dtype)
    table = torch.zeros(len(adapters), NUM_WORDS, dtype=torch.int64)
    weights = PackedLowRanks(dtype, code, in_features, tuple(sizes), table)
    for number, update in enumerate(adapters):
        if update is not None:
            put_low_rank(weights, number, update)
    return weights


def put_low_rank(weights: PackedLowRanks | LowRankWeights, number: int, update: LowRankAddition | None) -> None:
    """Replaces the weights of the adapter `number` and frees the previous ones; call between two steps. Recorded tapes
    use the new ones from their next replay on."""
    if type(weights) is not PackedLowRanks:
        reference.put_low_rank(weights, number, update)
        return
    weights.table[number] = 0
    weights.owners.pop(number, None)
    if update is None or not any(pair is not None for pair in update.pairs):
        return
    down, up = fused(update, weights.sizes)
    assert (down.size(1), up.size(0)) == (weights.in_features, weights.out_features)
    assert down.dtype is up.dtype is weights.dtype
    packed = prepare_linear(down, None), prepare_linear(up, None)
    assert all(type(part) is PackedWeight for part in packed)
    spans = torch.zeros(weights.out_features, 2, dtype=torch.int64)  # upper bound of the number of blocks
    sizes = weights.code, weights.out_features, down.size(0)
    LIBRARY.quire_low_rank_spans(*sizes, up.contiguous().data_ptr(), spans.data_ptr())
    gains = update.gains
    assert gains is None or (gains.is_contiguous() and gains.shape == (2, weights.out_features))
    weights.owners[number] = (*packed, spans, gains)
    places = packed[0].pointer, packed[1].pointer, spans.data_ptr(), 0 if gains is None else gains.data_ptr()
    weights.table[number] = torch.tensor([*places, down.size(0)])


def fused(update: LowRankAddition, sizes: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Fuses a layer's projections: `down` [sum of ranks, in_features] and block-diagonal `up` [sum of out_features, sum
    of ranks]."""
    downs = [pair[0] for pair in update.pairs if pair is not None]
    up = torch.zeros(sum(sizes), sum(len(down) for down in downs), dtype=downs[0].dtype)
    row = column = 0
    for pair, size in zip(update.pairs, sizes, strict=True):
        if pair is not None:
            rank = len(pair[0])
            up[row : row + size, column : column + rank] = pair[1]
            column += rank
        row += size
    return torch.cat(downs), up


def add_low_rank(x: Tensor, result: Tensor, weights: PackedLowRanks | LowRankWeights, rows: AdaptedRows) -> None:
    """Adds each row's low-rank product to `result` [num_tokens, out_features] in place, gains first; rows without an
    adapter stay."""
    if type(weights) is not PackedLowRanks:
        return reference.add_low_rank(x, result, weights, rows)
    assert x.dtype is weights.dtype
    assert x.size(1) == weights.in_features
    return _call(calls.add_low_rank, x, result, weights, rows)


def embed_low_rank(ids: Tensor, result: Tensor, weights: PackedLowRanks | LowRankWeights, rows: AdaptedRows) -> None:
    """Adds each row's low-rank embedding of `ids` int32 [num_tokens] to `result` [num_tokens, hidden_size] in place,
    gains first."""
    if type(weights) is not PackedLowRanks:
        return reference.embed_low_rank(ids, result, weights, rows)
    assert ids.dtype is torch.int32
    assert len(weights.sizes) == 1
    return _call(calls.embed_low_rank, ids, result, weights, rows)


def _call(
    function: Callable[..., None], given: Tensor, result: Tensor, weights: PackedLowRanks, rows: AdaptedRows
) -> None:
    """Calls a function of the library with dense tensors and the addresses of table and rows; `given`: x or ids."""
    assert result.dtype is weights.dtype
    assert result.size(1) == weights.out_features
    assert dense(given, result)
    function(
        weights.code,
        weights.in_features,
        weights.out_features,
        given.data_ptr(),
        weights.table.data_ptr(),
        rows.count.data_ptr(),
        rows.tokens.data_ptr(),
        rows.numbers.data_ptr(),
        result.data_ptr(),
    )
