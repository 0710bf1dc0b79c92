"""The least value that a filter leaves in a row whose tokens lie with several ranks, found without bringing them
together.

A filter keeps a token by its value alone: equals stay or go together. So all that ranks have to agree on is one number
a row. Where no row keeps more than a few, it is among the few best of each rank. Else its bits are found eight at a
time, most significant first: each rank tells how many of its tokens, or how much of their weight, falls to each of the
256 values that the next eight bits can have, and the sums say which it is. Four rounds, of 256 numbers a row, whatever
the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from quire.kernels.reference.sampling.digit_sums import DIGIT_BITS, value_of, weights_of

EVERYTHING = float("-inf")
SHIFTS = range(32 - DIGIT_BITS, -1, -DIGIT_BITS)


class FilterThresholds:
    """Each is float32 [num_rows], of all ranks' `values`; EVERYTHING where a row keeps all."""

    def __init__(self, digit_sums: Callable[..., Tensor], total: Callable[[Tensor], Tensor]) -> None:
        """`digit_sums`: the kernel; `total`: the sum of what each rank has found."""
        self._digit_sums, self._total = digit_sums, total

    def kth_largest(self, values: Tensor, counts: Tensor) -> Tensor:
        """The `counts`-th largest, int32 [num_rows]; all are kept where that is 0 or less."""
        known = torch.zeros((len(values), 1), dtype=torch.int64, device=values.device)
        left = counts.long().clamp(min=1).unsqueeze(1)
        for shift in SHIFTS:
            found = self._total(self._digit_sums(values, None, known, shift)).long()
            at_least = _suffix_sums(found)
            digit = (at_least >= left).sum(dim=1, keepdim=True) - 1
            left = left - (at_least - found).gather(1, digit)
            known = (known << DIGIT_BITS) | digit
        return torch.where(counts > 0, value_of(known.squeeze(1)), EVERYTHING)

    def nucleus(self, values: Tensor, tops: Tensor, top_p: Tensor) -> Tensor:
        """The least of the most likely values whose probabilities add up to `top_p` [num_rows], at least one; all are
        kept where that is 1. `tops` [num_rows, 1]: the largest values."""
        known = torch.zeros((len(values), 1), dtype=torch.int64, device=values.device)
        above = torch.zeros_like(known)  # the weight of what is larger than all that the search has come to
        limit: Tensor | None = None
        for shift in SHIFTS:
            found = self._total(self._digit_sums(values, tops, known, shift))
            limit = _limit(found, top_p) if limit is None else limit
            larger = above + _suffix_sums(found) - found
            kept = (found > 0) & (larger < limit)
            digit = kept.int().argmax(dim=1, keepdim=True)
            above = larger.gather(1, digit)
            known = (known << DIGIT_BITS) | digit
        return torch.where(top_p < 1, value_of(known.squeeze(1)), EVERYTHING)

    def nucleus_of_best(self, best: Tensor, values: Tensor, tops: Tensor, top_p: Tensor) -> Tensor:
        """The same where `best` [num_rows, n] are the n largest, in descending order, and all others are -inf or equal
        the last of them that is not."""
        nothing = torch.zeros((len(values), 1), dtype=torch.int64, device=values.device)
        here = self._digit_sums(values, tops, nothing, SHIFTS[0]).sum(dim=1, keepdim=True)
        limit = _limit(self._total(here), top_p)
        weights = weights_of(best, tops)
        kept = (weights > 0) & (weights.cumsum(dim=1) - weights < limit)
        least = best.masked_fill(~kept, float("inf")).amin(dim=1)
        return torch.where(top_p < 1, least, EVERYTHING)


def kth_of_best(best: Tensor, counts: Tensor) -> Tensor:
    """Returns kth_largest() of `best` [num_rows, n], the largest values in descending order; n is at least `counts`."""
    places = (counts.long() - 1).clamp(min=0).unsqueeze(1)
    return torch.where(counts > 0, best.gather(1, places).squeeze(1), EVERYTHING)


def _suffix_sums(found: Tensor) -> Tensor:
    """[num_rows, DIGITS]: of each digit and all larger ones."""
    return found.flip(1).cumsum(dim=1).flip(1)


def _limit(weights: Tensor, top_p: Tensor) -> Tensor:
    """float64 [num_rows, 1], of the `weights` [num_rows, n] of all tokens: one stays if what is above it weighs less.
    The most likely one does."""
    return (weights.sum(dim=1, keepdim=True).double() * top_p.double().unsqueeze(1)).clamp_(min=1.0)
