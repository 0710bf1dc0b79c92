"""Adds partial sums of several programs in the order of the parts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability


@dataclass(frozen=True)
class SplitSumsTuning:
    """Elements per program of the sums of parts."""

    block: int  # elements per program


TUNING = ByCapability({SM90: SplitSumsTuning(block=1024)})


@triton.jit(do_not_specialize=["count"])
def _add_splits(
    parts_ptr,
    row_scales_ptr,
    scales_ptr,
    bias_ptr,
    out_ptr,
    count,
    OUT: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Adds SPLITS parts of BLOCK elements, then applies scales and bias."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < count
    total = tl.load(parts_ptr + at, mask=inside, other=0)
    for split in tl.static_range(1, SPLITS):
        total += tl.load(parts_ptr + split * count + at, mask=inside, other=0)
    total = total.to(tl.float32)
    if scales_ptr is not None:
        total *= tl.load(scales_ptr + at % OUT, mask=inside, other=0.0)
        total *= tl.load(row_scales_ptr + at // OUT, mask=inside, other=0.0)
    if bias_ptr is not None:
        total += tl.load(bias_ptr + at % OUT, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=inside)


def add_splits(
    parts: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Adds parts float32 or int32 [splits, rows, columns], in order, to `out` [rows, columns], overwriting it;
    `scales`: factors by row and by column; `bias` [columns]."""
    splits, rows, columns = parts.shape
    count = rows * columns
    by_row, by_column = scales or (None, None)
    block = TUNING.here.block
    _add_splits[(triton.cdiv(count, block),)](
        parts, by_row, by_column, bias, out, count, OUT=columns, SPLITS=splits, BLOCK=block
    )
