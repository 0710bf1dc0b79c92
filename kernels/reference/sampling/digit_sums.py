"""A step of a search for a value among many rows' values, wherever these lie: by its bits, eight at a time."""

from __future__ import annotations

import torch

DIGIT_BITS = 8
DIGITS = 1 << DIGIT_BITS
UNIT = 2.0**40  # the weight of a row's largest value: of 2^23 as large ones the sum is still an int64


def digit_sums(values: torch.Tensor, tops: torch.Tensor | None, known: torch.Tensor, shift: int) -> torch.Tensor:
    """[num_rows, DIGITS]: what of each row falls to each value that the next bits can have.

    values: float32 [num_rows, size]; compared as ordered_bits() are
    tops: float32 [num_rows, 1]: the sums are of weights, exp(value - top) in whole multiples of 1 / UNIT, int64, so
        that they are exact in any order; None: each value counts 1, int32
    known: int64 [num_rows, 1], the bits before the next ones: only values that begin with them count
    shift: of the next bits, from the lowest; 24 at first, when nothing is known and `known` is 0
    """
    keys = ordered_bits(values)
    weights = torch.ones_like(keys, dtype=torch.int32) if tops is None else weights_of(values, tops)
    digits = (keys >> shift) & (DIGITS - 1)
    counted = keys >> (shift + DIGIT_BITS) == known
    sums = weights.new_zeros((len(values), DIGITS))
    return sums.scatter_add_(1, digits, weights * counted)


def ordered_bits(values: torch.Tensor) -> torch.Tensor:
    """int64 below 2^32, in the order of the float32 `values`."""
    bits = values.view(torch.int32).long()
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF) + (1 << 31)


def value_of(ordered: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    bits = ordered - (1 << 31)
    return torch.where(bits >= 0, bits, bits ^ 0x7FFFFFFF).int().view(torch.float32)


def weights_of(values: torch.Tensor, tops: torch.Tensor) -> torch.Tensor:
    """int64, of the shape of `values`, at most UNIT; 0 for NaN."""
    return (values - tops).exp_().nan_to_num_(nan=0.0).clamp_(max=1.0).mul_(UNIT).long()
