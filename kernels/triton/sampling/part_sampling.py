"""Sampling from a part of the vocabulary, as sampling.py without filters, which are applied before.

A row is split into blocks over many programs. All noise of many rows is computed here: bounds (bounded_sampling) would
be the next step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape, floats, ints, longs
from quire.kernels.triton.sampling.sampling import TUNING, BestOfParts, load_best, store_best, unless_lost

FIELDS = 3


@triton.jit(do_not_specialize=["first"])
def _best_of_block(
    logits_ptr,
    temperature_ptr,
    seeds_ptr,
    positions_ptr,
    scores_ptr,
    tokens_ptr,
    tops_ptr,
    size,
    row_stride,
    first,
    BLOCK: tl.constexpr,
):
    """Stores the best token of BLOCK tokens of a row, with its score, where the logits begin at token `first` of the
    vocabulary."""
    store_best(
        logits_ptr, temperature_ptr, seeds_ptr, positions_ptr, scores_ptr, tokens_ptr, tops_ptr, size, row_stride,
        first, BLOCK,
    )  # fmt: skip


@triton.jit
def _best_of_blocks(scores_ptr, tokens_ptr, tops_ptr, out_ptr, num_blocks, BLOCKS: tl.constexpr, FIELDS: tl.constexpr):
    """Combines a row's blocks: bits of the score, token id, bits of the largest logit. The first of equal scores
    wins."""
    score, token, top = load_best(scores_ptr, tokens_ptr, tops_ptr, num_blocks, BLOCKS)
    out = out_ptr + tl.program_id(0) * FIELDS
    tl.store(out, score.to(tl.int32, bitcast=True))
    tl.store(out + 1, token)
    tl.store(out + 2, top.to(tl.int32, bitcast=True))


@triton.jit(do_not_specialize=["num_rows", "num_parts"])
def _best_of_parts(found_ptr, out_ptr, num_rows, num_parts, PARTS: tl.constexpr, FIELDS: tl.constexpr):
    """Finds a row's token; -1 if its largest logit is infinite or NaN. Among equal scores the first part wins."""
    row = tl.program_id(0)
    part = tl.arange(0, PARTS)
    inside = part < num_parts
    at = found_ptr + (part * num_rows + row) * FIELDS
    scores = tl.load(at, mask=inside, other=0).to(tl.float32, bitcast=True)
    tops = tl.load(at + 2, mask=inside, other=0).to(tl.float32, bitcast=True)
    _, best = tl.max(tl.where(inside, scores, float("-inf")), 0, return_indices=True)
    top = tl.max(tl.where(inside, tops, float("-inf")), 0)
    token = tl.load(found_ptr + (best * num_rows + row) * FIELDS + 1)
    tl.store(out_ptr + row, unless_lost(token, top))


def best_of_part(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    first: int,
) -> torch.Tensor:
    """Returns the best token of each row's part, int32 [num_rows, 3]: score bits, token id, bits of the largest logit;
    `first`: token id of the first column."""
    assert logits.stride(1) == 1
    rows, size = logits.shape
    out = torch.empty((rows, FIELDS), dtype=torch.int32, device=logits.device)
    if not rows:
        return out
    best, tuning = BestOfParts.empty(rows, size, logits.device), TUNING.here
    _best_of_block[(best.num_parts, rows)](
        logits,
        temperature,
        seeds,
        positions,
        *best.tensors,
        size,
        logits.stride(0),
        first,
        BLOCK=tuning.part,
        num_warps=tuning.warps,
    )
    _best_of_blocks[(rows,)](*best.tensors, out, best.num_parts, BLOCKS=best.width, FIELDS=FIELDS, num_warps=1)
    return out


def best_of_parts(found: torch.Tensor) -> torch.Tensor:
    """Returns the tokens, int32 [num_rows], from all parts' best [num_parts, num_rows, 3]; -1 for a row without a
    choice."""
    assert found.is_contiguous()
    num_parts, rows, _ = found.shape
    out = torch.empty(rows, dtype=torch.int32, device=found.device)
    if rows:
        parts = max(triton.next_power_of_2(num_parts), 2)
        _best_of_parts[(rows,)](found, out, rows, num_parts, PARTS=parts, FIELDS=FIELDS, num_warps=1)
    return out


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernels' calls for a rank with a part of the vocabulary."""
    if shape.is_whole:
        return

    def choose(logits: torch.Tensor, temperature: torch.Tensor | None) -> None:
        rows = logits.size(0)
        best_of_part(logits, temperature, longs(rows), ints(rows), 0)

    if shape.batch_invariant:
        yield lambda: choose(shape.empty(2, shape.vocab_size), None)
        return
    logits = shape.empty(ROWS, shape.vocab_size)
    yield lambda: choose(logits, floats(ROWS))
    yield lambda: choose(logits, None)
    yield lambda: choose(floats(ROWS, shape.vocab_size), floats(ROWS))  # filters produce float32
    yield lambda: best_of_parts(ints(2, ROWS, FIELDS))
