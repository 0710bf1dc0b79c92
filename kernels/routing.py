"""How tokens choose among experts, and what stands between an expert's products. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

MOST_EXPERTS = 1024  # of a layer


@dataclass(frozen=True, slots=True)
class Routing:
    """How a token's logits, one for each expert, become its experts and their weights."""

    top_k: int  # experts of a token
    scoring: str = "softmax"  # over all experts; or "sigmoid", each by itself
    renormalize: bool = True  # the weights of a token's experts add up to 1
    scale: float = 1.0  # of the weights, in the end
    num_groups: int = 1  # neighbouring experts form groups, of which the best `top_groups` are looked at
    top_groups: int = 1
    group_top: int = 1  # a group is as good as so many of its best experts together


@dataclass(frozen=True, slots=True)
class Gate:
    """What stands between an expert's two products. Without a limit: silu(gate) * up.

    With one (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1), the gate cut off above it, up on both sides.
    """

    limit: float = 0.0
    alpha: float = 1.0


SILU = Gate()
