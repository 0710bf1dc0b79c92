"""Sampling with top-k, top-p and min-p without sorting the vocabulary, one row per program.

top-k: the k-th largest value, exactly, by radix selection: its bits are found eight at a time, most significant first,
by counting how many values share those known so far (four passes).

top-p: by rejection, an idea of FlashInfer (arXiv 2501.01005). The best noisy score among all candidates is the best of
the nucleus if its token lies in it, i.e. if the more likely tokens weigh less than top_p. If not, all tokens up to it
are excluded and the best of the more likely ones is next; weighing those and finding that best is the same pass.
Because the noise is a function of the token, this gives exactly the token that sorting gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, floats, ints, longs
from quire.kernels.triton.sampling.noise import gumbel_noise, row_keys

DIGIT_BITS = 8
LEFT_OUT = float("-inf")


@dataclass(frozen=True)
class FilteredTuning:
    """Elements at a time and warps of a row."""

    block: int  # tokens in registers at once
    warps: int


TUNING = ByCapability({SM90: FilteredTuning(block=8192, warps=16)})


@triton.jit
def _load(logits_ptr, tokens, vocab_size, temperature):
    logits = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    return logits / temperature


@triton.jit
def nan_as_inf(x):
    return tl.where(x == x, x, float("inf"))  # noqa: PLR0124


@triton.jit
def ordered_bits(x):
    """Maps floats to uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    return bits ^ tl.where(bits >> 31 != 0, 0xFFFFFFFF, 0x80000000).to(tl.uint32)


@triton.jit
def _value_of_bits(bits):
    """Inverts ordered_bits(), back to float32 values."""
    bits = bits ^ tl.where(bits >> 31 != 0, 0x80000000, 0xFFFFFFFF).to(tl.uint32)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _kth_largest(logits_ptr, vocab_size, temperature, k, BLOCK: tl.constexpr, DIGIT_BITS: tl.constexpr):
    """Returns the k-th largest value, 1 <= k <= vocab_size."""
    DIGITS: tl.constexpr = 1 << DIGIT_BITS
    digit = tl.arange(0, DIGITS)
    known = tl.zeros([], tl.uint32)  # the leading bits, then zeros
    unknown = tl.full([], 0xFFFFFFFF, tl.uint32)  # ones in place of these zeros
    for shift in range(32 - DIGIT_BITS, -1, -DIGIT_BITS):  # not unrolled: that would take seconds to compile
        counts = tl.zeros([DIGITS], tl.int32)
        for start in range(0, vocab_size, BLOCK):
            tokens = start + tl.arange(0, BLOCK)
            bits = ordered_bits(_load(logits_ptr, tokens, vocab_size, temperature))
            shares = (tokens < vocab_size) & ((bits | unknown) == (known | unknown))
            digits = (bits >> shift) & (DIGITS - 1)
            counts += tl.histogram(digits.to(tl.int32), DIGITS, mask=shares)
        at_least = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts  # values with this digit or a larger one
        chosen = tl.sum((at_least >= k).to(tl.int32), 0) - 1
        k -= tl.sum(tl.where(digit > chosen, counts, 0), 0)
        known |= chosen.to(tl.uint32) << shift
        unknown = unknown >> DIGIT_BITS
    return _value_of_bits(known)


@triton.jit
def _best_above(logits_ptr, vocab_size, temperature, floor, inclusive, top, key0, key1, BLOCK: tl.constexpr):
    """Returns the token with the best noisy score among values over `floor`, its value, and the weight of them all."""
    best_score = tl.full([], float("-inf"), tl.float32)
    best_token = tl.zeros([], tl.int32)
    best_value = tl.full([], float("-inf"), tl.float32)
    weights = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab_size, BLOCK):
        tokens = start + tl.arange(0, BLOCK)
        values = _load(logits_ptr, tokens, vocab_size, temperature)
        kept = (values > floor) | (inclusive & (values == floor))
        weights += tl.where(kept, tl.exp(values - top), 0.0)
        scores = tl.where(kept, values + gumbel_noise(key0, key1, tokens), float("-inf"))
        score, index = tl.max(scores, 0, return_indices=True)
        if score > best_score:
            best_score = score
            best_token = start + index
            best_value = tl.sum(tl.where(tokens == start + index, values, 0.0), 0)
    return best_token, best_value, tl.sum(weights, 0)


@triton.jit
def _top(logits_ptr, vocab_size, temperature, BLOCK: tl.constexpr):
    """Returns the largest value, +inf if there is a NaN, and its lowest token."""
    top = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    for start in range(0, vocab_size, BLOCK):
        values = _load(logits_ptr, start + tl.arange(0, BLOCK), vocab_size, temperature)
        value, index = tl.max(nan_as_inf(values), 0, return_indices=True)
        if value > top:
            top = value
            token = start + index
    return top, token


@triton.jit
def _sample_filtered(
    logits_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    seeds_ptr,
    positions_ptr,
    out_ptr,
    vocab_size,
    row_stride,
    BLOCK: tl.constexpr,
    DIGIT_BITS: tl.constexpr,
):
    """Samples one row's token with its temperature and its top_k, top_p and min_p, each unless its pointer is None;
    stores -1 if the row's largest logit is infinite or NaN."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    temperature = tl.load(temperature_ptr + row)
    greedy = temperature == 0.0
    temperature = tl.where(greedy, 1.0, temperature)
    top, token = _top(logits_ptr, vocab_size, temperature, BLOCK)
    lost = (top == float("inf")) | (top == float("-inf"))
    if not (greedy | lost):
        floor = tl.full([], float("-inf"), tl.float32)
        if min_p_ptr is not None:
            min_p = tl.load(min_p_ptr + row)
            if min_p > 0.0:
                floor = top + tl.log(min_p)
        if top_k_ptr is not None:
            top_k = tl.load(top_k_ptr + row)
            if (top_k > 0) & (top_k < vocab_size):
                floor = tl.maximum(floor, _kth_largest(logits_ptr, vocab_size, temperature, top_k, BLOCK, DIGIT_BITS))
        key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        top_p = 1.0
        if top_p_ptr is not None:
            top_p = tl.load(top_p_ptr + row)
        whole = tl.zeros([], tl.float32)
        first = tl.full([], 1, tl.int1)  # the same code for all rounds, because it takes long to compile
        searching = first
        while searching:
            next_token, next_value, weight = _best_above(
                logits_ptr, vocab_size, temperature, floor, first, top, key0, key1, BLOCK
            )
            whole = tl.where(first, weight, whole)
            found = first | ((weight > 0.0) & (weight >= top_p * whole))
            token = tl.where(found, next_token, token)
            floor = tl.where(found, next_value, floor)
            searching = found & (top_p < 1.0)
            first = first & False
    tl.store(out_ptr + row, tl.where(lost, -1, token))


def sample_filtered(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Samples one token per row of logits [num_rows, vocab_size] with filters, int32 [num_rows], as the reference does;
    rows may disable each filter."""
    rows, vocab_size = logits.shape
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        _sample_filtered[(rows,)](
            logits,
            temperature,
            top_k,
            top_p,
            min_p,
            seeds,
            positions,
            out,
            vocab_size,
            logits.stride(0),
            BLOCK=TUNING.here.block,
            DIGIT_BITS=DIGIT_BITS,
            num_warps=TUNING.here.warps,
        )
    return out


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's call for a rank with the whole vocabulary, except batch-invariantly."""
    if not shape.is_whole or shape.batch_invariant:
        return
    rows = shape.max_num_seqs
    filters = floats(rows), ints(rows), floats(rows), floats(rows)
    yield lambda: sample_filtered(shape.empty(rows, shape.vocab_size), *filters, longs(rows), ints(rows))
