"""Sampling: rows without filters are split into parts over many programs (many rows: bounded_sampling).

Rows with filters use filtered_sampling. Logits may be 16-bit: they are computed with in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, floats, ints, longs
from quire.kernels.triton.sampling.bounded_sampling import sample_bounded
from quire.kernels.triton.sampling.filtered_sampling import nan_as_inf, sample_filtered
from quire.kernels.triton.sampling.noise import gumbel_noise, row_keys


@dataclass(frozen=True)
class SamplingTuning:
    """Work per program, here and in part_sampling.py, digit_sums.py and bounded_sampling.py."""

    part: int  # tokens per program
    warps: int
    least_bounded_rows: int  # with fewer rows, bounds are slower than all noise at once


# A row of 152k tokens occupies 38 of an H200's 132 multiprocessors.
TUNING = ByCapability({SM90: SamplingTuning(part=4096, warps=8, least_bounded_rows=32)})


@triton.jit
def store_best(
    logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, scores_ptr, tokens_ptr, tops_ptr, size, row_stride, first,
    PART: tl.constexpr,
):  # fmt: skip
    """Stores the best noisy score of a program's part of a row, its token, and the part's largest logit (+inf for NaN).

    The row's first logit is that of token `first`.
    """
    part, row = tl.program_id(0), tl.program_id(1)
    places = part * PART + tl.arange(0, PART)
    source = logits_ptr + row.to(tl.int64) * row_stride + places
    logits = tl.load(source, mask=places < size, other=float("-inf")).to(tl.float32)
    at = row * tl.num_programs(0) + part
    tl.store(tops_ptr + at, tl.max(nan_as_inf(logits), 0))
    scores = logits
    if temperature_ptr is not None:
        temperature = tl.load(temperature_ptr + row)
        if temperature > 0.0:
            key0, key1 = row_keys(tl.load(seeds_ptr + row), tl.load(positions_ptr + row))
            scores = logits / temperature + gumbel_noise(key0, key1, first + places)
    score, index = tl.max(scores, 0, return_indices=True)
    tl.store(scores_ptr + at, score)
    tl.store(tokens_ptr + at, first + part * PART + index)


@triton.jit
def load_best(scores_ptr, tokens_ptr, tops_ptr, num_parts, PARTS: tl.constexpr):
    """Loads the best score of a row, its token, and the row's largest logit, from the parts of store_best().

    Among equal scores the first part wins.
    """
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    at = row * num_parts + part
    scores = tl.load(scores_ptr + at, mask=inside, other=float("-inf"))
    top = tl.max(tl.load(tops_ptr + at, mask=inside, other=float("-inf")), 0)
    score, best = tl.max(scores, 0, return_indices=True)
    return score, tl.load(tokens_ptr + row * num_parts + best), top


@triton.jit
def unless_lost(token, top):
    """Returns the token, or -1 if the row's largest logit is infinite or NaN."""
    lost = (top == float("inf")) | (top == float("-inf"))
    return tl.where(lost, -1, token)


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
    """Stores the best token of one part of a row."""
    store_best(
        logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, scores_ptr, tokens_ptr, tops_ptr, vocab_size, row_stride,
        0, PART,
    )  # fmt: skip


@triton.jit
def _best_of_row(scores_ptr, tokens_ptr, tops_ptr, out_ptr, num_parts, PARTS: tl.constexpr):
    """Stores a row's token, the best of its parts; -1 if its largest logit is infinite or NaN."""
    _, token, top = load_best(scores_ptr, tokens_ptr, tops_ptr, num_parts, PARTS)
    tl.store(out_ptr + tl.program_id(0), unless_lost(token, top))


def sample(logits: torch.Tensor, temperature: torch.Tensor | None, *columns: torch.Tensor | None) -> torch.Tensor:
    """Samples one token per row of logits [num_rows, vocab_size], int32 [num_rows], by the kernel for these filters and
    number of rows. `columns`: filters, seeds and positions in the reference's order."""
    assert logits.stride(1) == 1
    *filters, seeds, positions = columns
    if temperature is not None and any(column is not None for column in filters):
        return sample_filtered(logits, temperature, *columns)
    rows, vocab_size = logits.shape
    tuning, out = TUNING.here, torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    if temperature is not None and rows >= tuning.least_bounded_rows:
        return sample_bounded(logits, temperature, seeds, positions, tuning.part, tuning.warps)
    best = BestOfParts.empty(rows, vocab_size, logits.device)
    _best_of_part[(best.num_parts, rows)](
        logits,
        temperature,
        seeds,
        positions,
        *best.tensors,
        vocab_size,
        logits.stride(0),
        PART=tuning.part,
        num_warps=tuning.warps,
    )
    _best_of_row[(rows,)](*best.tensors, out, best.num_parts, PARTS=best.width, num_warps=1)
    return out


@dataclass(frozen=True)
class BestOfParts:
    """Memory between the two kernels: results of store_best() for each part of a row."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # scores, tokens, largest logits [rows, num_parts]
    num_parts: int

    @classmethod
    def empty(cls, rows: int, size: int, device: torch.device) -> BestOfParts:
        """Allocates the results of all parts of `rows` rows of `size` tokens."""
        num_parts = triton.cdiv(size, TUNING.here.part)
        scores, tops = (torch.empty((rows, num_parts), dtype=torch.float32, device=device) for _ in range(2))
        return cls((scores, torch.empty((rows, num_parts), dtype=torch.int32, device=device), tops), num_parts)

    @property
    def width(self) -> int:
        return max(triton.next_power_of_2(self.num_parts), 2)


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernels' calls without filters for a rank with the whole vocabulary, except batch-invariantly."""
    if not shape.is_whole or shape.batch_invariant:
        return

    def choose(rows: int, temperature: torch.Tensor | None) -> None:
        sample(shape.empty(rows, shape.vocab_size), temperature, None, None, None, longs(rows), ints(rows))

    yield partial(choose, shape.max_num_seqs, floats(shape.max_num_seqs))
    yield partial(choose, 8, floats(8))
    yield partial(choose, 8, None)
