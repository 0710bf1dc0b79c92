"""Combines partial attention results of one query: outputs and the logarithms of their weights.

A separate kernel: letting the last program of a query combine cost 1.5 to 3 us a layer more on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.triton.pdl import launch_dependents, wait_for_inputs
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, floats

WIDTHS = (8, 16, 32, 64)  # numbers of parts that kernels are compiled for; few, because a compilation delays a step


@dataclass(frozen=True)
class CombineTuning:
    """Warps of the combination for few and for many parts."""

    few_warps: int  # for at most WIDTHS[0] parts
    warps: int


TUNING = ByCapability({SM90: CombineTuning(few_warps=1, warps=4)})


@triton.jit(do_not_specialize=["num_parts"])
def _combine(
    parts_ptr,
    logs_ptr,
    out_ptr,
    num_parts,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Combines the parts of one query by the logarithms of their weights."""
    query = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    at = tl.arange(0, WIDTH)
    inside = at < HEAD_DIM
    if PDL:
        launch_dependents()
        wait_for_inputs()
    logs = tl.load(logs_ptr + query * num_parts + part, mask=part < num_parts, other=float("-inf"))
    top = tl.max(logs, 0)
    weights = tl.exp2(logs - tl.where(top == float("-inf"), 0.0, top))
    source = parts_ptr + (query * num_parts + part)[:, None] * HEAD_DIM + at[None, :]
    wanted = (weights > 0.0)[:, None] & inside[None, :]  # empty parts were never written
    parts = tl.load(source, mask=wanted, other=0.0)
    total = tl.sum(weights, 0)
    out = tl.sum(parts * weights[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(out_ptr + query * HEAD_DIM + at, out.to(out_ptr.dtype.element_ty), mask=inside)


def combine(parts: torch.Tensor, logs: torch.Tensor, out: torch.Tensor, *, pdl: bool = False) -> None:
    """Combines parts float32 [num_queries, num_parts, head_dim] to out [num_queries, head_dim].

    logs: float32 [num_queries, num_parts], base 2, -inf for empty parts, whose rows in `parts` may hold anything. The
    output is zero if all parts are empty.
    """
    num_queries, num_parts, head_dim = parts.shape
    launch = {"launch_pdl": True} if pdl else {}
    width = next(width for width in WIDTHS if width >= num_parts)
    _combine[(num_queries,)](
        parts,
        logs,
        out,
        num_parts,
        HEAD_DIM=head_dim,
        WIDTH=triton.next_power_of_2(head_dim),
        PARTS=width,
        PDL=pdl,
        num_warps=TUNING.here.few_warps if width == WIDTHS[0] else TUNING.here.warps,
        **launch,
    )


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls; the number of parts depends on the number of heads."""
    if shape.batch_invariant:
        return
    queries, size = shape.num_q_heads, shape.head_dim if shape.latent is None else shape.latent.rank
    for width in WIDTHS:
        yield partial(combine, floats(queries, width, size), floats(queries, width), shape.empty(queries, size))
