"""Variants of decoder blocks, by part of a block. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AttentionConfig:
    """Variants of grouped-query attention."""

    qkv_bias: bool = False
    o_bias: bool = False
    fused_qkv: bool = False  # queries, keys and values are one checkpoint tensor
    qk_norm: bool = False  # queries and keys are normalized per head
    has_sinks: bool = False  # attention sinks: a learned score per head in every softmax (arXiv 2309.17453)
    softcap: float = 0.0  # scores become cap * tanh(score / cap); 0: none
    scale: float | None = None  # softmax scale; None: 1 / sqrt(head_dim)
    chunked_windows: bool = False  # windows begin at multiples of their length instead of sliding


@dataclass(frozen=True, slots=True)
class FeedForwardConfig:
    """Variants of the dense feed-forward layer."""

    activation: str = "silu"
    bias: bool = False
    fused: bool = False  # gate and up projections are one checkpoint tensor


@dataclass(frozen=True, slots=True)
class ScaleConfig:
    """Constant factors folded into the weights of embedding, layers and norms, and the soft cap of logits."""

    embedding: float = 1.0
    residual: float = 1.0  # of the layers' updates of the residual stream
    logit: float = 1.0
    logit_cap: float = 0.0  # soft: cap * tanh(logit / cap); 0: none
    norm_offset: float = 0.0  # added to the weights of norms


GROUPED_QUERIES, GATED_SILU, UNSCALED = AttentionConfig(), FeedForwardConfig(), ScaleConfig()
