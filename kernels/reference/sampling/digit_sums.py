"""One step of a radix search for a value in each row, eight bits at a time, for values on any rank."""

from __future__ import annotations

import torch

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
UNIT = 2.0**40  # weight of a row's largest value; the sum of 2^23 of them still fits an int64


def digit_sums(values: torch.Tensor, tops: torch.Tensor | None, known: torch.Tensor, shift: int) -> torch.Tensor:
    """Sums each row's values by their next bits: [num_rows, DIGITS].

    values: float32 [num_rows, size]; compared by ordered_bits()
    tops: float32 [num_rows, 1]: sums weights, exp(value - top) in whole multiples of 1 / UNIT, int64, so that they are
        exact in any order; None: counts values, int32
    known: int64 [num_rows, 1], the leading bits: only values that start with them are included
    shift: of the next bits, from the lowest; 24 at first, when nothing is known and `known` is 0
    """
    keys = ordered_bits(values)
    weights = torch.ones_like(keys, dtype=torch.int32) if tops is None else weights_of(values, tops)
    digits = (keys >> shift) & (DIGITS - 1)
    counted = keys >> (shift + DIGIT_BITS) == known
    sums = weights.new_zeros((len(values), DIGITS))
    return sums.scatter_add_(1, digits, weights * counted)


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """Maps float32 values to int64 below 2^32 in the same order."""
    bits = values.view(torch.int32).long()
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) + (1 << 31)


def value_of(ordered: torch.Tensor) -> torch.Tensor:
    """Inverts ordered_bits(), back to float32 values."""
    bits = ordered - (1 << 31)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).int().view(torch.float32)


def weights_of(values: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """Returns int64 weights of the values' shape, at most UNIT; 0 for NaN."""
    return (values - tops).exp_().nan_to_num_(nan=0.0).clamp_(max=1.0).mul_(UNIT).long()
