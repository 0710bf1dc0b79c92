"""What distinguishes the blocks of one decoder from those of another, by part of a block. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Variants of grouped-query attention."""

    qkv_bias: bool = False
    o_bias: bool = False
    fused_qkv: bool = False  # queries, keys and values are one tensor in the checkpoint
    qk_norm: bool = False  # queries and keys are normalised per head
    has_sinks: bool = False  # a learned score of each head in every softmax (arXiv 2309.17453)
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: none
    scale: float | None = None  # of scores; None: 1 / sqrt(head_dim)
    chunked_windows: bool = False  # windows begin at multiples of their length instead of sliding


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """Variants of the dense feed-forward layer."""

    activation: str = "silu"
    bias: bool = False
    fused: bool = False  # gates and ups are one tensor in the checkpoint


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Constants that become part of the weights, and the cap of logits."""

    embedding: float = 1.0
    residual: float = 1.0  # of what layers add to the residual stream
    logit: float = 1.0
    logit_cap: float = 0.0  # soft: cap * tanh(logit / cap); 0: none
    norm_offset: float = 0.0  # added to the weights of norms


GROUPED_QUERIES, GATED_SILU, UNSCALED = AttentionConfig(), FeedForwardConfig(), ScaleConfig()
