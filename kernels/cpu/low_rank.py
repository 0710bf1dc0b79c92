"""Adapters on the compiled library (low_rank.cpp). Meaning, shapes and dtypes: kernels/reference/low_rank.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from kernels import reference
from kernels.cpu.functions import PackedWeight, dense, prepare_linear
from kernels.cpu.native import DTYPES, LIBRARY, calls
from kernels.reference.low_rank import AdaptedRows, LowRankPair, LowRankWeights

Tensor = torch.Tensor
NUM_WORDS = 4  # of LowRank in low_rank.cpp


@dataclass(frozen=True, slots=True)
class PackedLowRanks:
    """`table` [num_adapters, NUM_WORDS]: addresses of down, up and spans, and the ranks; zeros where there is none."""

    dtype: torch.dtype
    code: int
    in_features: int
    out_features: int
    table: Tensor
    owners: dict[int, tuple[object, ...]] = field(default_factory=dict)  # keep the memory behind the addresses


def prepare_low_rank(
    pairs: Sequence[LowRankPair | None], in_features: int, out_features: int, dtype: torch.dtype
) -> PackedLowRanks | LowRankWeights:
    code = DTYPES.get(dtype)
    if code is None:
        return reference.prepare_low_rank(pairs, in_features, out_features, dtype)
    table = torch.zeros(len(pairs), NUM_WORDS, dtype=torch.int64)
    weights = PackedLowRanks(dtype, code, in_features, out_features, table)
    for number, pair in enumerate(pairs):
        put_low_rank(weights, number, pair)
    return weights


def put_low_rank(weights: PackedLowRanks | LowRankWeights, number: int, pair: LowRankPair | None) -> None:
    if type(weights) is not PackedLowRanks:
        reference.put_low_rank(weights, number, pair)
        return
    weights.table[number] = 0
    weights.owners.pop(number, None)
    if pair is None:
        return
    down, up = pair
    assert (down.size(1), up.size(0)) == (weights.in_features, weights.out_features)
    assert down.dtype is up.dtype is weights.dtype
    packed = prepare_linear(down, None), prepare_linear(up, None)
    assert all(type(part) is PackedWeight for part in packed)
    spans = torch.zeros(weights.out_features, 2, dtype=torch.int64)  # more than there are blocks
    sizes = weights.code, weights.out_features, down.size(0)
    LIBRARY.quire_low_rank_spans(*sizes, up.contiguous().data_ptr(), spans.data_ptr())
    weights.owners[number] = (*packed, spans)
    weights.table[number] = torch.tensor([packed[0].pointer, packed[1].pointer, spans.data_ptr(), down.size(0)])


def add_low_rank(x: Tensor, result: Tensor, weights: PackedLowRanks | LowRankWeights, rows: AdaptedRows) -> None:
    if type(weights) is not PackedLowRanks:
        return reference.add_low_rank(x, result, weights, rows)
    assert x.dtype is result.dtype is weights.dtype
    assert (x.size(1), result.size(1)) == (weights.in_features, weights.out_features)
    assert dense(x, result)
    calls.add_low_rank(
        weights.code,
        weights.in_features,
        weights.out_features,
        x.data_ptr(),
        weights.table.data_ptr(),
        rows.count.data_ptr(),
        rows.tokens.data_ptr(),
        rows.numbers.data_ptr(),
        result.data_ptr(),
    )
    return None
