"""The least value that a filter leaves in a row whose tokens lie with several ranks, found without bringing them
together.

A filter keeps a token by its value alone: equals stay or go together. So all that ranks have to agree on is one number
a row. Where no row keeps more than a few, it is among the few best of each rank. Else its bits are found eight at a
time, most significant first: each rank tells how many of its tokens, or how much of their weight, falls to each of the
256 values that the next eight bits can have, and the sums say which it is. Four rounds, of 256 numbers a row, whatever
the vocabulary.

Weights are whole multiples of 2^-40 of the most likely token's, so that their sums are exact in any order.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.worker.sampling.vocabulary.part import VocabPart

Total = Callable[[Tensor], Tensor]

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
SHIFTS = range(32 - DIGIT_BITS, -1, -DIGIT_BITS)
UNIT = 2.0**40  # the weight of the most likely token: of 2^23 as likely ones the sum is still an int64
EVERYTHING = float("-inf")


def kth_of_best(best: Tensor, counts: Tensor) -> Tensor:
    """float32 [num_rows]: of `best` [num_rows, n], the largest values of all in descending order, the `counts`-th.
    `counts` int32 [num_rows], at most n; EVERYTHING where one is 0 or less."""
    places = (counts.long() - 1).clamp(min=0).unsqueeze(1)
    return torch.where(counts > 0, best.gather(1, places).squeeze(1), EVERYTHING)


def kth_largest(values: Tensor, counts: Tensor, part: VocabPart, total: Total) -> Tensor:
    """The same of all ranks' `values` [num_rows, part.size]; EVERYTHING, too, where a count is no less than the
    vocabulary."""
    bounded = (counts > 0) & (counts < part.vocab_size)
    search = _Search(values)
    left = counts.long().clamp(min=1, max=part.vocab_size).unsqueeze(1)
    ones = torch.ones_like(search.keys, dtype=torch.int32)
    for shift in SHIFTS:
        found = total(search.by_digit(shift, ones)).long()
        at_least = _from_above(found)
        digit = (at_least >= left).sum(dim=1, keepdim=True) - 1
        left = left - (at_least - found).gather(1, digit)
        search.choose(digit)
    return torch.where(bounded, search.value(), EVERYTHING)


def nucleus_of_best(best: Tensor, values: Tensor, tops: Tensor, top_p: Tensor, total: Total) -> Tensor:
    """float32 [num_rows]: of all ranks' `values` [num_rows, part.size] the least of the most likely ones whose
    probabilities add up to `top_p` [num_rows], at least one; EVERYTHING where that is 1. `tops` [num_rows, 1]: the
    largest ones; `best` [num_rows, n]: the n largest in descending order, and all others are -inf or equal the last."""
    limit = _limit(_weights(values, tops), top_p, total)
    weights = _weights(best, tops)
    kept = (weights > 0) & (weights.cumsum(dim=1) - weights < limit)
    least = best.masked_fill(~kept, float("inf")).amin(dim=1)
    return torch.where(top_p < 1, least, EVERYTHING)


def nucleus_floor(values: Tensor, tops: Tensor, top_p: Tensor, total: Total) -> Tensor:
    """The same without `best`."""
    weights = _weights(values, tops)
    limit = _limit(weights, top_p, total)
    search = _Search(values)
    above = torch.zeros_like(limit, dtype=torch.int64)  # the weight of what is larger than the search has come to
    for shift in SHIFTS:
        found = total(search.by_digit(shift, weights))
        larger = above + _from_above(found) - found
        kept = (found > 0) & (larger < limit)
        digit = kept.int().argmax(dim=1, keepdim=True)
        above = larger.gather(1, digit)
        search.choose(digit)
    return torch.where(top_p < 1, search.value(), EVERYTHING)


def _weights(values: Tensor, tops: Tensor) -> Tensor:
    return (values - tops).exp_().nan_to_num_(nan=0.0).mul_(UNIT).long()


def _limit(weights: Tensor, top_p: Tensor, total: Total) -> Tensor:
    """float64 [num_rows, 1]: a token stays if what is above it weighs less. The most likely one does."""
    return (total(weights.sum(dim=1, keepdim=True)).double() * top_p.double().unsqueeze(1)).clamp_(min=1.0)


def _from_above(found: Tensor) -> Tensor:
    """[num_rows, DIGITS]: of each digit and all larger ones."""
    return found.flip(1).cumsum(dim=1).flip(1)


class _Search:
    """A value of each row, as far as its bits are known."""

    def __init__(self, values: Tensor) -> None:
        bits = values.view(torch.int32).long()
        # In [0, 2^32), in the order of the values.
        self.keys = torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) + (1 << 31)
        self._known = torch.zeros_like(self.keys[:, :1])

    def by_digit(self, shift: int, weights: Tensor) -> Tensor:
        """[num_rows, DIGITS]: the weight of this rank's values by their next digit, of those that agree so far."""
        agree = self.keys >> (shift + DIGIT_BITS) == self._known
        digits = (self.keys >> shift) & (DIGITS - 1)
        sums = weights.new_zeros((len(weights), DIGITS))
        return sums.scatter_add_(1, digits, weights * agree)

    def choose(self, digit: Tensor) -> None:
        self._known = (self._known << DIGIT_BITS) | digit

    def value(self) -> Tensor:
        """float32 [num_rows], once all digits are chosen."""
        bits = self._known.squeeze(1) - (1 << 31)
        return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).int().view(torch.float32)
