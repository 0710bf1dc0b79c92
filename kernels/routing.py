"""Routing configuration of experts and the gate between an expert's products. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

MOST_EXPERTS = 1024  # per layer


@dataclass(frozen=True, slots=True)
class Routing:
    """Selection of a token's experts and their weights from its logits."""

    top_k: int  # experts per token
    scoring: str = "softmax"  # over all experts; or "sigmoid" per expert
    renormalize: bool = True  # normalize a token's weights to a sum of 1
    scale: float = 1.0  # factor of the weights
    num_groups: int = 1  # consecutive experts form groups; only the best `top_groups` are considered
    top_groups: int = 1
    group_top: int = 1  # a group is ranked by the sum of this many best experts


@dataclass(frozen=True, slots=True)
class Gate:
    """Activation between an expert's two products. Without a limit: silu(gate) * up.

    With a limit (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1), the gate clamped from above, up on both sides.
    """

    limit: float = 0.0
    alpha: float = 1.0


SILU = Gate()
