"""Matrix products with tiles that depend on the weight's shape alone.

An element of the result is the sum of one accumulator over the input features, in steps of DEPTH from first to last, in
the same kind of matrix instruction, whether its tile of rows is full or has a single one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton.attention.attention_tile import dot_precision
from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape

ALIGNMENT = 16  # bytes; unaligned pointers would compile another kernel


@dataclass(frozen=True)
class InvariantLinearTuning:
    """Tile sizes by the weight's shape alone."""

    rows: int  # of a tile
    columns: int
    wide_columns: int  # of a tile for 16-bit weights with `many_columns`
    many_columns: int  # columns of a weight from which wide tiles fill the GPU
    depth: int  # input features at a time
    float32_depth: int
    stages: int
    warps: int


# 64 rows are one warp group's matrix instruction, which a single row needs as well.
TUNING = ByCapability(
    {
        SM90: InvariantLinearTuning(
            rows=64, columns=64, wide_columns=128, many_columns=1 << 14, depth=64, float32_depth=32, stages=3, warps=4
        )
    }
)


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
    """Multiplies a tile of rows with a tile of the weight's rows over all features."""
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
    """Computes x @ weight.T + bias batch-invariantly: [num_tokens, in_features] -> [num_tokens, out_features], in x's
    dtype."""
    out_features, in_features = weight.weight.shape
    num_rows = x.size(0)
    x = x.contiguous()
    if x.data_ptr() % ALIGNMENT:
        x = x.clone()
    out = torch.empty((num_rows, out_features), dtype=x.dtype, device=x.device)
    if not num_rows:
        return out
    tuning, is_float32 = TUNING.here, x.element_size() == 4
    columns = tuning.wide_columns if out_features >= tuning.many_columns and not is_float32 else tuning.columns
    _linear[(triton.cdiv(num_rows, tuning.rows), triton.cdiv(out_features, columns))](
        x,
        weight.weight,
        weight.bias,
        out,
        num_rows,
        IN=in_features,
        OUT=out_features,
        ROWS=tuning.rows,
        COLUMNS=columns,
        DEPTH=tuning.float32_depth if is_float32 else tuning.depth,
        STAGES=tuning.stages,
        PRECISION=dot_precision(x.element_size()),
        num_warps=tuning.warps,
        num_stages=tuning.stages,
        enable_fp_fusion=False,
    )
    return out


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the calls of the model's products, if it runs batch-invariantly."""
    if not shape.batch_invariant:
        return

    def multiply(rows: int, in_features: int, out_features: int) -> None:
        linear(shape.empty(rows, in_features), LinearWeight(shape.empty(out_features, in_features), None))

    hidden, features = shape.hidden_size, shape.intermediate_size
    for size in (shape.qkv_size, 2 * features, shape.vocab_size):
        yield partial(multiply, 2, hidden, size)
    for size in (shape.q_size, features):
        yield partial(multiply, 2, size, hidden)
    if shape.experts is not None:
        yield partial(multiply, ROWS, hidden, shape.experts.num_experts)
