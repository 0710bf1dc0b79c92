"""Routing: scores in registers, the best experts selected one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.capability import SM90, ByCapability
from quire.kernels.routing import Routing
from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape, floats

LEAST = -1.0e30  # replaces NaN, so that rows of NaN still select experts


@dataclass(frozen=True)
class RoutingTuning:
    """Rows per program and warps of the routing."""

    rows: int  # per program
    warps: int


TUNING = ByCapability({SM90: RoutingTuning(rows=4, warps=1)})


@triton.jit
def scores_of(logits, inside, SIGMOID: tl.constexpr):
    """Computes scores float32 [rows, WIDTH]; columns outside `inside` are padding."""
    if SIGMOID:
        scores = tl.sigmoid(logits)
    else:
        logits = tl.where(inside, logits, float("-inf"))
        scores = tl.exp(logits - tl.max(logits, 1)[:, None])
        scores = scores / tl.sum(scores, 1)[:, None]
    return scores


@triton.jit
def _merits(choice, group, GROUPS: tl.constexpr, GROUP_TOP: tl.constexpr, GROUP_WIDTH: tl.constexpr):
    """Returns the sum of each group's best experts, float32 [rows, GROUP_WIDTH]."""
    at = tl.arange(0, GROUP_WIDTH)[None, :]
    place = tl.arange(0, choice.shape[1])[None, :]
    merits = tl.full([choice.shape[0], GROUP_WIDTH], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        left = tl.where(group == g, choice, float("-inf"))
        merit = tl.zeros([choice.shape[0]], tl.float32)
        for _ in tl.static_range(GROUP_TOP):
            best = tl.argmax(left, 1, tie_break_left=True)
            merit += tl.max(left, 1)
            left = tl.where(place == best[:, None], float("-inf"), left)
        merits = tl.where(at == g, merit[:, None], merits)
    return merits


@triton.jit
def choice_of(
    scores,
    bias_ptr,
    at,
    EXPERTS: tl.constexpr,
    GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_TOP: tl.constexpr,
    GROUP_WIDTH: tl.constexpr,
    LEAST: tl.constexpr,
):
    """Returns the scores used for selection: -inf for padding and experts outside the best groups."""
    inside = (at < EXPERTS)[None, :]
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + at, mask=at < EXPERTS, other=0.0)[None, :]
    choice = tl.where(choice >= LEAST, choice, LEAST)
    choice = tl.where(inside, choice, float("-inf"))
    if GROUPS > 1:
        group = (at // (EXPERTS // GROUPS))[None, :]
        merits = _merits(choice, group, GROUPS, GROUP_TOP, GROUP_WIDTH)
        allowed = tl.zeros(choice.shape, tl.int1)
        groups_at = tl.arange(0, GROUP_WIDTH)[None, :]
        for _ in tl.static_range(TOP_GROUPS):
            best = tl.argmax(merits, 1, tie_break_left=True)
            merits = tl.where(groups_at == best[:, None], float("-inf"), merits)
            allowed = allowed | (group == best[:, None])
        choice = tl.where(allowed, choice, float("-inf"))
    return choice


@triton.jit
def _take_best(choice, scores, at):
    """Returns the best experts of the rows, their scores, and the choice without them."""
    best = tl.argmax(choice, 1, tie_break_left=True)
    is_best = at[None, :] == best[:, None]
    return best, tl.sum(tl.where(is_best, scores, 0.0), 1), tl.where(is_best, float("-inf"), choice)


@triton.jit
def take_top(choice, scores, at, TOP_K: tl.constexpr, TOP_WIDTH: tl.constexpr, RENORMALIZE: tl.constexpr):
    """Returns the rows' experts and weights, [rows, TOP_WIDTH] each; past TOP_K expert 0 with weight 0."""
    place = tl.arange(0, TOP_WIDTH)[None, :]
    ids = tl.zeros([choice.shape[0], TOP_WIDTH], tl.int32)
    weights = tl.zeros([choice.shape[0], TOP_WIDTH], tl.float32)
    total = tl.zeros([choice.shape[0]], tl.float32)
    for k in tl.static_range(TOP_K):
        best, score, choice = _take_best(choice, scores, at)
        ids = tl.where(place == k, best[:, None], ids)
        weights = tl.where(place == k, score[:, None], weights)
        total += score
    if RENORMALIZE:
        weights = weights / total[:, None]
    return ids, weights


@triton.jit
def choose(
    logits,
    bias_ptr,
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
    """Computes take_top() of float32 logits [rows, WIDTH]."""
    at = tl.arange(0, WIDTH)
    scores = scores_of(logits, (at < EXPERTS)[None, :], SIGMOID)
    choice = choice_of(scores, bias_ptr, at, EXPERTS, GROUPS, TOP_GROUPS, GROUP_TOP, GROUP_WIDTH, LEAST)
    return take_top(choice, scores, at, TOP_K, TOP_WIDTH, RENORMALIZE)


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    logits_ptr,
    bias_ptr,
    ids_ptr,
    weights_ptr,
    num_rows,
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
    ROWS: tl.constexpr,
):
    """Routes some rows: stores the best experts and their weights."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at, place = tl.arange(0, WIDTH), tl.arange(0, TOP_WIDTH)
    has_row, inside = (row < num_rows)[:, None], (at < EXPERTS)[None, :]
    source = logits_ptr + row.to(tl.int64)[:, None] * EXPERTS + at[None, :]
    logits = tl.load(source, mask=has_row & inside, other=0.0).to(tl.float32)
    ids, weights = choose(
        logits, bias_ptr, EXPERTS, WIDTH, TOP_K, TOP_WIDTH, SIGMOID, RENORMALIZE, GROUPS, TOP_GROUPS, GROUP_TOP,
        GROUP_WIDTH, LEAST,
    )  # fmt: skip
    to = row.to(tl.int64)[:, None] * TOP_K + place[None, :]
    kept = has_row & (place < TOP_K)[None, :]
    tl.store(ids_ptr + to, ids, mask=kept)
    tl.store(weights_ptr + to, weights * scale, mask=kept)


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes logits [num_tokens, num_experts] to int32 experts and float32 weights, [num_tokens, top_k] each, best
    first."""
    num_rows = logits.size(0)
    logits = logits.contiguous()
    ids = torch.empty((num_rows, routing.top_k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((num_rows, routing.top_k), dtype=torch.float32, device=logits.device)
    if num_rows:
        tuning = TUNING.here
        _route[(triton.cdiv(num_rows, tuning.rows),)](
            logits, bias, ids, weights, num_rows, routing.scale, **constants(routing, logits.size(1)),
            ROWS=tuning.rows, num_warps=tuning.warps,
        )  # fmt: skip
    return ids, weights


def constants(routing: Routing, num_experts: int) -> dict[str, object]:
    """Returns the compile-time constants of a routing kernel, by parameter name. Requires top_k <= num_experts."""
    assert routing.top_k <= num_experts
    return {
        "EXPERTS": num_experts,
        "WIDTH": triton.next_power_of_2(num_experts),
        "TOP_K": routing.top_k,
        "TOP_WIDTH": triton.next_power_of_2(routing.top_k),
        "SIGMOID": routing.scoring == "sigmoid",
        "RENORMALIZE": routing.renormalize,
        "GROUPS": routing.num_groups,
        "TOP_GROUPS": routing.top_groups,
        "GROUP_TOP": routing.group_top,
        "GROUP_WIDTH": triton.next_power_of_2(routing.num_groups),
        "LEAST": LEAST,
    }


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's call for models with experts."""
    if shape.experts is not None:
        bias = floats(shape.experts.num_experts) if shape.experts.score_correction_bias else None
        logits, routing = shape.empty(ROWS, shape.experts.num_experts), shape.experts.routing
        yield lambda: route(logits, routing, bias)
