"""Mixture-of-experts layers: routing, and the products of the chosen experts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch.nn import functional

from quire.kernels.reference.low_rank import AdaptedRows, ExpertAdditions, add_low_rank
from quire.kernels.routing import SILU, Gate, Routing


@dataclass(frozen=True)
class ExpertsWeight:
    """Weights packed for `experts`. Opaque to callers: each package packs in its own way."""

    gate_up: torch.Tensor  # [num_experts, 2 * intermediate_size, hidden_size], gates first
    down: torch.Tensor  # [num_experts, hidden_size, intermediate_size]
    gate_up_bias: torch.Tensor | None  # [num_experts, 2 * intermediate_size]
    down_bias: torch.Tensor | None  # [num_experts, hidden_size]
    gate: Gate

    @property
    def by_expert(self) -> tuple[torch.Tensor, ...]:
        """Tensors with experts as first dimension, which together hold everything of an expert."""
        return tuple(each for each in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if each is not None)


def route(
    logits: torch.Tensor, routing: Routing, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Routes logits [num_tokens, num_experts]: experts int32 and weights float32, [num_tokens, top_k] each, best first.

    Among equal scores the expert with the lower index comes first. `bias` float32 [num_experts] is added where
    experts are chosen, not to their weights (arXiv 2412.19437, section 2.1.2).
    """
    logits = logits.float()
    scores = logits.softmax(1) if routing.scoring == "softmax" else logits.sigmoid()
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        choice = choice.masked_fill(~_looked_at(choice, routing), float("-inf"))
    ids = choice.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, ids)
    if routing.renormalize:
        weights = weights / weights.sum(1, keepdim=True)
    return ids.int(), weights * routing.scale


def _looked_at(choice: torch.Tensor, routing: Routing) -> torch.Tensor:
    """Returns the mask, bool of choice's shape, of experts in each token's best `top_groups` groups; a group's merit is
    the sum of its best `group_top` scores."""
    grouped = choice.view(len(choice), routing.num_groups, -1)
    merit = grouped.topk(routing.group_top, dim=2).values.sum(2)
    best = merit.sort(dim=1, descending=True, stable=True).indices[:, : routing.top_groups]
    groups = torch.zeros_like(merit, dtype=torch.bool).scatter_(1, best, True)
    return groups.unsqueeze(2).expand_as(grouped).flatten(1)


def prepare_experts(
    gate_up: torch.Tensor,
    down: torch.Tensor,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    gate: Gate = SILU,
) -> ExpertsWeight:
    """Packs the weights, once, when the model is loaded. Shapes: ExpertsWeight.

    May keep the given tensors or copies of them; the caller drops its references.
    """
    return ExpertsWeight(gate_up, down, gate_up_bias, down_bias, gate)


def experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    packed: ExpertsWeight,
    shared: torch.Tensor | None = None,
    shared_gate: torch.Tensor | None = None,
    load: torch.Tensor | None = None,
    added: ExpertAdditions | None = None,
) -> torch.Tensor:
    """Computes each token's weighted sum of its experts' outputs: [num_tokens, hidden_size] -> the same shape.

    `ids`, `weights`: from `route`; pairs with id -1 are skipped, because another rank has the expert. `shared`
    [num_tokens, hidden_size] is added, times sigmoid(`shared_gate` [num_tokens, 1]) if given. `load` int64
    [num_experts] is incremented by each expert's tokens. Experts without tokens are not read. `added`: adapters of both
    products; not with a limit of the gate. Results are rounded to x's dtype after either product and at the end.
    """
    numbers = None if added is None else added.rows.of_rows(len(x))
    outputs = x.new_zeros((*ids.shape, x.size(1)))
    counts = torch.bincount(ids[ids >= 0], minlength=len(packed.gate_up))
    for expert in counts.nonzero().flatten().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        of_expert = None
        if added is not None and numbers is not None:
            count, own = len(packed.gate_up), numbers[token]
            keys = torch.where(own < 0, own, own * count + expert)
            of_expert = replace(added, rows=AdaptedRows.of(keys, added.rows.num_adapters * count))
        outputs[token, place] = _expert(x[token], packed, expert, of_expert)
    if load is not None:
        load += counts
    out = (outputs.float() * weights.unsqueeze(2)).sum(1)
    if shared is not None:
        out += shared.float() if shared_gate is None else shared.float() * shared_gate.float().sigmoid()
    return out.to(x.dtype)


def _expert(x: torch.Tensor, packed: ExpertsWeight, expert: int, added: ExpertAdditions | None) -> torch.Tensor:
    """Computes one expert's output for x [num_rows, hidden_size], same shape, unweighted; `added`: adapters of the rows
    of x."""

    def bias(of: torch.Tensor | None) -> torch.Tensor | None:
        return None if of is None else of[expert]

    gate_up = functional.linear(x, packed.gate_up[expert], bias(packed.gate_up_bias))
    if added is not None:
        add_low_rank(x, gate_up, added.gate_up, added.rows)
    between = gated(gate_up, packed.gate)
    result = functional.linear(between, packed.down[expert], bias(packed.down_bias))
    if added is not None:
        add_low_rank(between, result, added.down, added.rows)
    return result


def gated(gate_up: torch.Tensor, gate: Gate) -> torch.Tensor:
    """Applies the gate: [num_tokens, 2 * size], gates first -> [num_tokens, size]."""
    first, second = gate_up.chunk(2, dim=-1)
    if not gate.limit:
        return functional.silu(first) * second
    first, second = first.clamp(max=gate.limit), second.clamp(-gate.limit, gate.limit)
    return (second + 1) * first * torch.sigmoid(first * gate.alpha)
