"""One step of a radix search over a part of the vocabulary; values are read once and not copied."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.reference.sampling.digit_sums import DIGIT_BITS, DIGITS, UNIT
from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape, floats, longs
from quire.kernels.triton.sampling.filtered_sampling import ordered_bits
from quire.kernels.triton.sampling.sampling import TUNING


@triton.jit(do_not_specialize=["shift"])
def _digit_sums(
    values_ptr,
    tops_ptr,
    known_ptr,
    sums_ptr,
    size,
    row_stride,
    shift,
    UNIT: tl.constexpr,
    BLOCK: tl.constexpr,
    DIGITS: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
):
    """Adds the counts or weights of BLOCK values to their row's sums by digit."""
    block, row = tl.program_id(0), tl.program_id(1)
    places = block * BLOCK + tl.arange(0, BLOCK)
    inside = places < size
    values = tl.load(values_ptr + row.to(tl.int64) * row_stride + places, mask=inside, other=float("-inf"))
    bits = ordered_bits(values).to(tl.int64)
    counted = inside & ((bits >> (shift + DIGIT_BITS)) == tl.load(known_ptr + row))
    digits = ((bits >> shift) & (DIGITS - 1)).to(tl.int32)
    sums = sums_ptr + row * DIGITS
    if tops_ptr is None:
        counts = tl.histogram(digits, DIGITS, mask=counted)
        tl.atomic_add(sums + tl.arange(0, DIGITS), counts, mask=counts > 0, sem="relaxed")
    else:
        weights = tl.minimum(tl.exp(values - tl.load(tops_ptr + row)), 1.0) * UNIT
        some = counted & (weights >= 1.0)
        weights = tl.where(some, weights, 0.0).to(tl.int64)
        tl.atomic_add(sums + digits, weights, mask=some, sem="relaxed")


def digit_sums(values: torch.Tensor, tops: torch.Tensor | None, known: torch.Tensor, shift: int) -> torch.Tensor:
    """Sums each row's float32 values, or their weights, by their next bits: [num_rows, DIGITS], int32 counts or int64
    weights."""
    assert values.stride(1) == 1
    assert values.dtype is torch.float32
    rows, size = values.shape
    dtype = torch.int32 if tops is None else torch.int64
    sums = torch.zeros((rows, DIGITS), dtype=dtype, device=values.device)
    if rows:
        tuning = TUNING.here
        _digit_sums[(triton.cdiv(size, tuning.part), rows)](
            values,
            tops,
            known,
            sums,
            size,
            values.stride(0),
            shift,
            UNIT=UNIT,
            BLOCK=tuning.part,
            DIGITS=DIGITS,
            DIGIT_BITS=DIGIT_BITS,
            num_warps=tuning.warps,
        )
    return sums


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls for a rank with a part of the vocabulary, except batch-invariantly."""
    if shape.is_whole or shape.batch_invariant:
        return
    values, known = floats(ROWS, shape.vocab_size), longs(ROWS, 1)
    yield lambda: digit_sums(values, None, known, 24)
    yield lambda: digit_sums(values, floats(ROWS, 1), known, 24)
