"""Matrix products with weights, cut up by the weight's shape alone.

An element of the result is one accumulator's sum over the input features, in steps of DEPTH from first to last, in the
same kind of matrix instruction, whether its tile of rows is full or has a single one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton.attention.attention_tile import dot_precision

ROWS = 64  # one group of warps' matrix instruction, as many as one row needs
MANY_COLUMNS = 1 << 14  # of a weight: from here on tiles of 128 fill a GPU
ALIGNMENT = 16  # bytes: a kernel is compiled anew for pointers that do not have it


@triton.jit(do_not_specialize=["num_rows"])
def _linear(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    num_rows,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.arange(0, DEPTH)
    x_at = x_ptr + row[:, None] * IN + at[None, :]
    weight_at = weight_ptr + column[None, :] * IN + at[:, None]
    has_row, has_column = (row < num_rows)[:, None], (column < OUT)[None, :]
    out = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, IN, DEPTH, num_stages=STAGES):
        if IN % DEPTH == 0:
            x = tl.load(x_at + start, mask=has_row, other=0.0)
            weight = tl.load(weight_at + start, mask=has_column, other=0.0)
        else:
            x = tl.load(x_at + start, mask=has_row & (start + at < IN)[None, :], other=0.0)
            weight = tl.load(weight_at + start, mask=has_column & (start + at < IN)[:, None], other=0.0)
        out = tl.dot(x, weight, out, input_precision=PRECISION)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + column, mask=column < OUT, other=0.0).to(tl.float32)[None, :]
    to = out_ptr + row[:, None] * OUT + column[None, :]
    tl.store(to, out.to(out_ptr.dtype.element_ty), mask=has_row & has_column)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    out_features, in_features = weight.weight.shape
    num_rows = x.size(0)
    x = x.contiguous()
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    wide = x.element_size() == 4
    columns = 128 if out_features >= MANY_COLUMNS and not wide else 64
    _linear[(triton.cdiv(num_rows, ROWS), triton.cdiv(out_features, columns))](
        x,
        weight.weight,
        weight.bias,
        out,
        num_rows,
        IN=in_features,
        OUT=out_features,
        ROWS=ROWS,
        COLUMNS=columns,
        DEPTH=32 if wide else 64,
        STAGES=3,
        PRECISION=dot_precision(x.element_size()),
        num_warps=4,
        num_stages=3,
        enable_fp_fusion=False,
    )
    return out
