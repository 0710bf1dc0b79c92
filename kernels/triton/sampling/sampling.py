"""Choosing tokens. Without filters a row is cut into parts that many programs look at (many rows: bounded_sampling);
with them: filtered_sampling.

Logits may be 16-bit too: they are read as they are and computed with in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.sampling import bounded_sampling
from quire.kernels.triton.sampling.filtered_sampling import nan_as_inf, sample_filtered
from quire.kernels.triton.sampling.noise import gumbel_noise, row_keys

PART = 4096  # tokens a program: a row of 152k keeps 38 of the H200's 132 processors busy


@triton.jit
def _best_of_part(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    scores_ptr,
    tokens_ptr,
    tops_ptr,
    vocab_size,
    row_stride,
    PART: tl.constexpr,
):
    """The best noisy score of a part and its token, and the part's largest logit, +inf for NaN."""
    part, row = tl.program_id(0), tl.program_id(1)
    tokens = part * PART + tl.arange(0, PART)
    source = logits_ptr + row.to(tl.int64) * row_stride + tokens
    logits = tl.load(source, mask=tokens < vocab_size, other=float("-inf")).to(tl.float32)
    at = row * tl.num_programs(0) + part
    tl.store(tops_ptr + at, tl.max(nan_as_inf(logits), 0))
    scores = logits
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            scores = logits / temperature + gumbel_noise(key0, key1, tokens)
    score, index = tl.max(scores, 0, return_indices=True)
    tl.store(scores_ptr + at, score)
    tl.store(tokens_ptr + at, part * PART + index)


@triton.jit
def _best_of_row(scores_ptr, tokens_ptr, tops_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    """A row's token; -1 if its largest logit is infinite or NaN. Of equal scores the first part's is taken."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    at = row * num_parts + part
    scores = tl.load(scores_ptr + at, mask=inside, other=float("-inf"))
    tops = tl.load(tops_ptr + at, mask=inside, other=float("-inf"))
    top = tl.max(tops, 0)
    _, best = tl.max(scores, 0, return_indices=True)
    token = tl.load(tokens_ptr + row * num_parts + best)
    lost = (top == float("inf")) | (top == float("-inf"))
    tl.store(out_ptr + row, tl.where(lost, -1, token))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    min_p: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    assert logits.stride(1) == 1
    if temperature is not None and not (top_k is None and top_p is None and min_p is None):
        return sample_filtered(logits, temperature, top_k, top_p, min_p, seeds, positions)
    rows, vocab_size = logits.shape
    num_parts = triton.cdiv(vocab_size, PART)
    out = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    if temperature is not None and rows >= bounded_sampling.LEAST_ROWS:
        return bounded_sampling.sample_bounded(logits, temperature, seeds, positions, PART)
    scores, tops = (torch.empty((rows, num_parts), dtype=torch.float32, device=logits.device) for _ in range(2))
    tokens = torch.empty((rows, num_parts), dtype=torch.int32, device=logits.device)
    _best_of_part[(num_parts, rows)](
        logits,
        temperature,
        seeds,
        positions,
        scores,
        tokens,
        tops,
        vocab_size,
        logits.stride(0),
        PART=PART,
        num_warps=8,
    )
    _best_of_row[(rows,)](
        scores, tokens, tops, out, num_parts, PARTS=max(triton.next_power_of_2(num_parts), 2), num_warps=1
    )
    return out
