"""Finds the smallest value that a filter keeps in a row whose tokens are sharded over ranks, without gathering the row.

A filter keeps a token by its value alone: equal values are kept or dropped together. So ranks have to agree on one
number per row. If no row keeps more than a few tokens, it is among the few best of each rank. Otherwise it is found by
a radix search, eight bits at a time, most significant first: each rank reports how many of its tokens, or how much of
their weight, fall to each of the 256 values of the next eight bits, and the sums select the digit. Four rounds of 256
numbers per row, whatever the vocabulary size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.reference.sampling.digit_sums import DIGIT_BITS, value_of, weights_of

EVERYTHING = float("-inf")
SHIFTS = range(32 - DIGIT_BITS, -1, -DIGIT_BITS)


class FilterThresholds:
    """Computes float32 [num_rows] thresholds over all ranks' `values`; EVERYTHING where a row keeps all tokens."""

    def __init__(self, digit_sums: Callable[..., Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """`digit_sums`: the kernel; `total`: all-reduce sum over the ranks."""
        self._digit_sums, self._total = digit_sums, total

    def kth_largest(self, values: Tensor, counts: Tensor) -> Tensor:
        """Returns the `counts`-th largest value, `counts` int32 [num_rows]; rows with 0 or less keep all tokens."""
        known = torch.zeros((len(values), 1), dtype=torch.int64, device=values.device)
        remaining = counts.long().clamp(min=1).unsqueeze(1)
        for shift in SHIFTS:
            sums = self._total(self._digit_sums(values, None, known, shift)).long()
            at_least = _suffix_sums(sums)
            digit = (at_least >= remaining).sum(dim=1, keepdim=True) - 1
            remaining = remaining - (at_least - sums).gather(1, digit)
            known = (known << DIGIT_BITS) | digit
        return torch.where(counts > 0, value_of(known.squeeze(1)), EVERYTHING)

    def nucleus(self, values: Tensor, tops: Tensor, top_p: Tensor) -> Tensor:
        """Returns the smallest of the most likely values whose probabilities add up to `top_p` [num_rows], at least
        one; rows with 1 keep all tokens. `tops` [num_rows, 1]: the largest values."""
        known = torch.zeros((len(values), 1), dtype=torch.int64, device=values.device)
        above = torch.zeros_like(known)  # weight of the values above the current search interval
        limit: Tensor | None = None
        for shift in SHIFTS:
            sums = self._total(self._digit_sums(values, tops, known, shift))
            limit = _limit(sums, top_p) if limit is None else limit
            larger = above + _suffix_sums(sums) - sums
            kept = (sums > 0) & (larger < limit)
            digit = kept.int().argmax(dim=1, keepdim=True)
            above = larger.gather(1, digit)
            known = (known << DIGIT_BITS) | digit
        return torch.where(top_p < 1, value_of(known.squeeze(1)), EVERYTHING)

    def nucleus_of_best(self, best: Tensor, values: Tensor, tops: Tensor, top_p: Tensor) -> Tensor:
        """Returns nucleus() where `best` [num_rows, n] holds the n largest values in descending order, and all other
        values are -inf or equal to the smallest finite one of them."""
        nothing = torch.zeros((len(values), 1), dtype=torch.int64, device=values.device)
        local_weight = self._digit_sums(values, tops, nothing, SHIFTS[0]).sum(dim=1, keepdim=True)
        limit = _limit(self._total(local_weight), top_p)
        weights = weights_of(best, tops)
        kept = (weights > 0) & (weights.cumsum(dim=1) - weights < limit)
        least = best.masked_fill(~kept, float("inf")).amin(dim=1)
        return torch.where(top_p < 1, least, EVERYTHING)


def kth_of_best(best: Tensor, counts: Tensor) -> Tensor:
    """Returns kth_largest() of `best` [num_rows, n], the largest values in descending order; n is at least `counts`."""
    places = (counts.long() - 1).clamp(min=0).unsqueeze(1)
    return torch.where(counts > 0, best.gather(1, places).squeeze(1), EVERYTHING)


def _suffix_sums(sums: Tensor) -> Tensor:
    """Returns for each digit the sum over it and all larger ones, [num_rows, DIGITS]."""
    return sums.flip(1).cumsum(dim=1).flip(1)


def _limit(weights: Tensor, top_p: Tensor) -> Tensor:
    """Returns the cumulative weight below which top_p keeps a token, float64 [num_rows, 1]: `top_p` [num_rows] times
    the sum of `weights` [num_rows, n] over all tokens, at least 1.0, the weight of the most likely token, which is
    always kept."""
    return (weights.sum(dim=1, keepdim=True).double() * top_p.double().unsqueeze(1)).clamp_(min=1.0)
