"""Input and output kernels of a decode step, one where torch would need five."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.precompile.shapes import ROWS, TABLE_WIDTH, Calls, ModelShape, ints

BLOCK = 128


@triton.jit(do_not_specialize=["num_rows"])
def _begin_step(
    slots_ptr, given_ptr, places_ptr, ids_ptr, last_tokens_ptr, tables_ptr, out_ptr, num_rows, BLOCK: tl.constexpr
):
    """Computes begin_step() for BLOCK rows."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    place = tl.load(places_ptr + row, mask=inside, other=0)
    tl.store(tables_ptr + place, tl.load(ids_ptr + row, mask=inside, other=0), mask=inside)
    given = tl.load(given_ptr + row, mask=inside, other=0)
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    last = tl.load(last_tokens_ptr + slot, mask=inside, other=0)
    tl.store(out_ptr + row, tl.where(given >= 0, given, tl.maximum(last, 0)), mask=inside)


@triton.jit(do_not_specialize=["num_rows"])
def _end_step(slots_ptr, token_ids_ptr, last_tokens_ptr, num_rows, BLOCK: tl.constexpr):
    """Stores the sampled tokens of BLOCK rows as the last tokens of their slots."""
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    slot = tl.load(slots_ptr + row, mask=inside, other=0)
    tl.store(last_tokens_ptr + slot, tl.load(token_ids_ptr + row, mask=inside, other=0), mask=inside)


def begin_step(
    slots: torch.Tensor,
    given: torch.Tensor,
    places: torch.Tensor,
    block_ids: torch.Tensor,
    last_tokens: torch.Tensor,
    block_tables: torch.Tensor,
) -> torch.Tensor:
    """Writes block_ids to `places` of the flat block_tables; returns `given` where not negative, else the last tokens.

    The last tokens, last_tokens[slots], are at least 0. Everything is int32 and dense, the first four [num_rows].
    """
    num_rows = slots.size(0)
    token_ids = torch.empty_like(slots)
    grid = (triton.cdiv(num_rows, BLOCK),)
    _begin_step[grid](slots, given, places, block_ids, last_tokens, block_tables, token_ids, num_rows, BLOCK=BLOCK)
    return token_ids


def end_step(slots: torch.Tensor, token_ids: torch.Tensor, last_tokens: torch.Tensor) -> None:
    """Sets last_tokens[slots] = token_ids."""
    num_rows = slots.size(0)
    _end_step[(triton.cdiv(num_rows, BLOCK),)](slots, token_ids, last_tokens, num_rows, BLOCK=BLOCK)


def precompile_calls(shape: ModelShape) -> Calls:
    yield lambda: begin_step(*(ints(ROWS) for _ in range(5)), ints(ROWS, TABLE_WIDTH))
    yield lambda: end_step(ints(ROWS), ints(ROWS), ints(ROWS))
