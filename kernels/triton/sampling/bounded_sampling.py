"""Sampling by temperature for many rows, with most noise never computed.

A token's noise takes two logarithms, a bound of it none. The first kernel finds the largest bound of every part of a
row; the second computes scores in the part with the largest bound, then in those with a bound above the best score: two
or three of 38, for any logits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling.filtered_sampling import nan_as_inf
from quire.kernels.triton.sampling.noise import gumbel_noise, noise_bound, row_keys


@triton.jit
def _bounds_of_part(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    bounds_ptr,
    tops_ptr,
    vocab_size,
    row_stride,
    PART: tl.constexpr,
):
    """Computes an upper bound of the part's scores and its largest logit, +inf for NaN."""
    part, row = tl.program_id(0), tl.program_id(1)
    tokens = part * PART + tl.arange(0, PART)
    source = logits_ptr + row.to(tl.int64) * row_stride + tokens
    logits = tl.load(source, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    at = row * tl.num_programs(0) + part
    top = tl.max(nan_as_inf(logits), 0)
    tl.store(tops_ptr + at, top)
    bound = top
    temperature = tl.load(temperature_ptr + row)
    if temperature > 0.0:
        key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
        bound = tl.max(logits / temperature + noise_bound(key0, key1, tokens), 0)
    tl.store(bounds_ptr + at, bound)


@triton.jit
def _best_within_bounds(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    bounds_ptr,
    tops_ptr,
    out_ptr,
    vocab_size,
    row_stride,
    num_parts,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Finds a row's token; -1 if its largest logit is infinite or NaN. Among equal scores the lowest token wins."""
    row = tl.program_id(0)
    logits_ptr += row.to(tl.int64) * row_stride
    parts = tl.arange(0, PARTS)
    inside = parts < num_parts
    bounds = tl.load(bounds_ptr + row * num_parts + parts, mask=inside, other=float("-inf"))
    top = tl.max(tl.load(tops_ptr + row * num_parts + parts, mask=inside, other=float("-inf")), 0)
    lost = (top == float("inf")) | (top == float("-inf"))
    temperature = tl.load(temperature_ptr + row)
    key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
    best = tl.full([], float("-inf"), tl.float32)
    token = tl.zeros([], tl.int32)
    bound, part = tl.max(bounds, 0, return_indices=True)
    while (bound >= best) & (bound > float("-inf")) & (lost == 0):
        tokens = part * PART + tl.arange(0, PART)
        scores = tl.load(logits_ptr + tokens, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
        if temperature > 0.0:
            scores = scores / temperature + gumbel_noise(key0, key1, tokens)
        score, index = tl.max(scores, 0, return_indices=True)
        found = part * PART + index
        better = (score > best) | ((score == best) & (found < token))
        token = tl.where(better, found, token)
        best = tl.maximum(best, score)
        bounds = tl.where(parts == part, float("-inf"), bounds)
        bound, part = tl.max(bounds, 0, return_indices=True)
    tl.store(out_ptr + row, tl.where(lost, -1, token))


def sample_bounded(
    logits: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, part: int, warps: int
) -> torch.Tensor:
    """Samples one token per row of logits [num_rows, vocab_size] without filters, int32 [num_rows], as the reference
    does; `part`: tokens per program, `warps`: of a program."""
    rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, part)
    bounds, tops = (torch.empty((rows, num_parts), dtype=torch.float32, device=logits.device) for _ in range(2))
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    inputs = logits, temperature, seeds, positions, bounds, tops
    _bounds_of_part[(num_parts, rows)](*inputs, vocab_size, logits.stride(0), PART=part, num_warps=warps)
    parts = max(triton.next_power_of_2(num_parts), 2)
    _best_within_bounds[(rows,)](
        *inputs, out, vocab_size, logits.stride(0), num_parts, PART=part, PARTS=parts, num_warps=warps
    )
    return out
