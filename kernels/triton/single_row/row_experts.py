"""Experts of a single token in two kernels that read only the chosen ones, for decoding a single sequence
(row_linear.py).

Both kernels select the token's experts in every program: that is a few hundred numbers, and a separate kernel would be
one more link in the chain.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.routing import Routing
from quire.kernels.triton.moe.expert_layers import StackedExperts
from quire.kernels.triton.moe.grouped_linear import activate
from quire.kernels.triton.moe.routing import choose, constants
from quire.kernels.triton.pdl import HAS_PDL, launch_dependents, wait_for_inputs
from quire.kernels.triton.precompile.shapes import Calls, ModelShape, longs
from quire.kernels.triton.single_row.row_linear import RowNorm


@dataclass(frozen=True)
class RowExpertsTile:
    """Rows of a weight per program: of gates and of ups each; of every expert's second weight."""

    up: int
    down: int


@dataclass(frozen=True)
class RowExpertsTuning:
    """Rows of the weights per program, elements at a time and warps of both products."""

    tile: RowExpertsTile
    chunk: int  # elements of a weight's row at a time
    warps: int


# Fastest of nine tiles tried on an H200: 37 us; 4 and 2 rows take over 42.
TUNING = ByCapability({SM90: RowExpertsTuning(RowExpertsTile(up=8, down=4), chunk=1024, warps=4)})


@triton.jit
def _choice_of_row(
    logits_ptr,
    scale,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Returns the token's experts and their weights, [TOP_WIDTH] each; past TOP_K expert 0 with weight 0."""
    at = tl.arange(0, WIDTH)
    logits = tl.load(logits_ptr + at, mask=at < EXPERTS, other=0.0).to(tl.float32)[None, :]
    ids, weights = choose(
        logits, None, EXPERTS, WIDTH, TOP_K, TOP_WIDTH, SIGMOID, RENORMALIZE, GROUPS, TOP_GROUPS, GROUP_TOP,
        GROUP_WIDTH, LEAST,
    )  # fmt: skip
    return tl.max(ids, 0), tl.sum(weights, 0) * scale


@triton.jit(do_not_specialize=["eps", "scale"])
def _row_experts_up(
    x_ptr,
    norm_ptr,
    logits_ptr,
    weight_ptr,
    out_ptr,
    load_ptr,
    eps,
    scale,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    LIMIT: tl.constexpr,
    ALPHA: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Computes the gated activations of the token's experts: out [TOP_K, OUT]."""
    rank = tl.program_id(1)
    row = tl.arange(0, 2 * ROWS)
    output = tl.program_id(0) * ROWS + row % ROWS
    at = tl.arange(0, CHUNK)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    ids, _ = _choice_of_row(
        logits_ptr, scale, EXPERTS, WIDTH, TOP_K, TOP_WIDTH, SIGMOID, RENORMALIZE, GROUPS, TOP_GROUPS, GROUP_TOP,
        GROUP_WIDTH, LEAST,
    )  # fmt: skip
    expert = tl.sum(tl.where(tl.arange(0, TOP_WIDTH) == rank, ids, 0), 0)
    if load_ptr is not None:  # noqa: SIM102 - one is known by the type of an argument, the other by its value
        if tl.program_id(0) == 0:
            tl.store(load_ptr + expert, tl.load(load_ptr + expert) + 1)
    weight_row = expert.to(tl.int64) * (2 * OUT) + tl.where(output < OUT, output, 0) + row // ROWS * OUT
    source = weight_ptr + weight_row[:, None] * IN + at[None, :]
    squares = tl.zeros([CHUNK], tl.float32)
    sums = tl.zeros([2 * ROWS, CHUNK], tl.float32)
    for start in tl.static_range(0, IN, CHUNK):
        inside = start + at < IN
        x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        weights = tl.load(source + start, mask=inside[None, :], other=0.0).to(tl.float32)
        squares += x * x
        x *= tl.load(norm_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        sums += weights * x[None, :]
    y = tl.sum(sums, 1) * tl.rsqrt(tl.sum(squares, 0) / IN + eps)
    gate, up = tl.split(tl.trans(tl.reshape(y, (2, ROWS))))
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    made = activate(gate, up, LIMIT, ALPHA)
    tl.store(out_ptr + rank * OUT + output, made.to(out_ptr.dtype.element_ty), mask=output < OUT)


@triton.jit(do_not_specialize=["scale"])
def _row_experts_down(
    gated_ptr,
    logits_ptr,
    weight_ptr,
    residual_ptr,
    scale,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_WIDTH: tl.constexpr,
    SIGMOID: tl.constexpr,
    RENORMALIZE: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Adds the weighted sum of the experts' outputs for `gated` [TOP_K, IN] to the residual."""
    if PDL:
        launch_dependents()
        wait_for_inputs()
    ids, weights = _choice_of_row(
        logits_ptr, scale, EXPERTS, WIDTH, TOP_K, TOP_WIDTH, SIGMOID, RENORMALIZE, GROUPS, TOP_GROUPS, GROUP_TOP,
        GROUP_WIDTH, LEAST,
    )  # fmt: skip
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    read = tl.where(output < OUT, output, 0)
    row = tl.reshape(ids.to(tl.int64)[:, None] * OUT + read[None, :], (TOP_WIDTH * ROWS,))
    rank = tl.arange(0, TOP_WIDTH * ROWS) // ROWS
    at = tl.arange(0, CHUNK)
    sums = tl.zeros([TOP_WIDTH * ROWS, CHUNK], tl.float32)
    for start in tl.static_range(0, IN, CHUNK):
        inside = (rank < TOP_K)[:, None] & (start + at < IN)[None, :]
        weight = tl.load(weight_ptr + row[:, None] * IN + start + at[None, :], mask=inside, other=0.0).to(tl.float32)
        gated = tl.load(gated_ptr + rank[:, None] * IN + start + at[None, :], mask=inside, other=0.0).to(tl.float32)
        sums += weight * gated
    made = tl.reshape(tl.sum(sums, 1), (TOP_WIDTH, ROWS))
    to = residual_ptr + output
    y = tl.sum(made * weights[:, None], 0) + tl.load(to, mask=output < OUT, other=0.0).to(tl.float32)
    tl.store(to, y.to(residual_ptr.dtype.element_ty), mask=output < OUT)


def row_experts_takes(routing: Routing) -> bool:
    """Returns whether registers suffice for the number of experts per token."""
    return routing.top_k <= 16


def row_experts(
    residual: torch.Tensor,
    norm: RowNorm,
    logits: torch.Tensor,
    routing: Routing,
    packed: StackedExperts,
    load: torch.Tensor | None = None,
    *,
    pdl: bool = False,
    shape: RowExpertsTile | None = None,
) -> None:
    """Adds the output of the experts chosen by `logits` [1, num_experts] for rms_norm(residual) to `residual` [1,
    hidden_size] in place, in two launches. Increments `load` int64 [num_experts] of the chosen ones; biases are not
    supported."""
    assert packed.gate_up_bias is None
    assert packed.down_bias is None
    tuning, (_, hidden_size, size) = TUNING.here, packed.down.shape
    shape = shape or tuning.tile
    chosen = constants(routing, packed.down.size(0))
    launch = {"launch_pdl": True} if pdl else {}
    gated = torch.empty((routing.top_k, size), dtype=residual.dtype, device=residual.device)
    _row_experts_up[(triton.cdiv(size, shape.up), routing.top_k)](
        residual, norm.weight, logits, packed.gate_up, gated, load, norm.eps, routing.scale,
        IN=hidden_size, OUT=size, ROWS=shape.up, CHUNK=min(tuning.chunk, triton.next_power_of_2(hidden_size)), PDL=pdl,
        LIMIT=packed.gate.limit, ALPHA=packed.gate.alpha, **chosen, num_warps=tuning.warps, **launch,
    )  # fmt: skip
    _row_experts_down[(triton.cdiv(hidden_size, shape.down),)](
        gated, logits, packed.down, residual, routing.scale,
        IN=size, OUT=hidden_size, ROWS=shape.down, CHUNK=min(tuning.chunk, triton.next_power_of_2(size)), PDL=pdl,
        **chosen, num_warps=tuning.warps, **launch,
    )  # fmt: skip


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the calls of both kernels for models that run single rows with experts."""
    experts = shape.experts
    if experts is None or not experts.single_row or not shape.runs_single_rows:
        return
    count, size, hidden = experts.num_experts, experts.intermediate_size, shape.hidden_size
    gate_up, down = shape.empty(count, 2 * size, hidden), shape.empty(count, hidden, size)
    packed, norm = StackedExperts(gate_up, down, None, None, experts.gate), RowNorm(shape.empty(hidden), 1e-6)
    row, logits, load = shape.empty(1, hidden), shape.empty(1, count), longs(count)
    yield lambda: row_experts(row, norm, logits, experts.routing, packed, load, pdl=HAS_PDL.here)
