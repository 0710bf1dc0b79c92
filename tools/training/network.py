"""Qwen3 in plain torch for training.

Parameters have the names of Hugging Face. Weights are kept in float32 and rounded to bfloat16 wherever they are
used, and activations are bfloat16 throughout: the model is trained with the rounding of serving.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class NetworkShape:
    """Sizes of the model, in the words of its config.json."""

    vocab_size: int = 4096
    hidden_size: int = 256
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 32
    intermediate_size: int = 768
    max_position_embeddings: int = 4096
    # Keys have 16 rotating pairs. With this base the slowest seven turn less than once in 4,096 positions, so that
    # heads can match content from one end of a document to the other.
    rope_theta: float = 1_000_000.0
    rms_norm_eps: float = 1e-6


@dataclass(frozen=True, slots=True)
class PackedSpan:
    """A run of whole conversations among the packed tokens, of about one length.

    `cumulative` holds their limits, counted from `start`: [num_sequences + 1], int32. Conversations are grouped by
    length because a varlen kernel launches as many blocks for each of them as for the longest.
    """

    start: int
    stop: int
    cumulative: Tensor
    max_length: int


Rope = tuple[Tensor, Tensor]
"""Cosine and sine of every position: [..., 1, head_dim], to be broadcast over heads."""


class AttentionWeights(NamedTuple):
    """Weights of a layer before attention."""

    norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    q_norm: Tensor
    k_norm: Tensor


class FeedForwardWeights(NamedTuple):
    """Weights of a layer after attention."""

    o: Tensor
    norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root mean square norm over the last dimension, in float32, rounded before the weight is applied."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return wide.to(x.dtype) * weight.to(x.dtype)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Product with a weight of any dtype, in x's."""
    return F.linear(x, weight.to(x.dtype))


def rotary(positions: Tensor, shape: NetworkShape, dtype: torch.dtype) -> Rope:
    """Returns cosines and sines of the rotation of positions [...], each [..., 1, head_dim], computed in float32."""
    exponents = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32) / shape.head_dim
    angles = positions.float()[..., None] * shape.rope_theta**-exponents
    angles = torch.cat((angles, angles), dim=-1)[..., None, :]
    return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, rope: Rope) -> Tensor:
    """Apply rotary position embedding to [..., num_heads, head_dim]."""
    cos, sin = rope
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


# The two halves of a layer take their weights as arguments, not from a module: compiled once, they serve every layer.


def before_attention(x: Tensor, rope: Rope, weights: AttentionWeights, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns rotated queries and keys and values, each [..., heads, head_dim], after norm, projections, and
    per-head norm of queries and keys."""
    normed = rms_norm(x, weights.norm, eps)
    heads = (*x.shape[:-1], -1, weights.q_norm.shape[0])
    q = rms_norm(linear(normed, weights.q).view(heads), weights.q_norm, eps)
    k = rms_norm(linear(normed, weights.k).view(heads), weights.k_norm, eps)
    return rotate(q, rope), rotate(k, rope), linear(normed, weights.v).view(heads)


def after_attention(x: Tensor, attended: Tensor, weights: FeedForwardWeights, eps: float) -> Tensor:
    """Output projection, then the gated feed-forward network, each added to what came in."""
    x = x + linear(attended, weights.o)
    normed = rms_norm(x, weights.norm, eps)
    return x + linear(F.silu(linear(normed, weights.gate)) * linear(normed, weights.up), weights.down)


def token_losses(
    x: Tensor, targets: Tensor, final_norm: Tensor, embedding: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Cross-entropy and whether the likeliest token is the target, of hidden states [num_targets, hidden]."""
    logits = linear(rms_norm(x, final_norm, eps), embedding).float()
    return F.cross_entropy(logits, targets, reduction="none"), logits.argmax(-1) == targets


@dataclass(frozen=True, slots=True)
class Parts:
    """The computation apart from attention. Training compiles it; attention stays outside, because its limits
    change."""

    before_attention: Callable[..., tuple[Tensor, Tensor, Tensor]] = before_attention
    after_attention: Callable[..., Tensor] = after_attention
    token_losses: Callable[..., tuple[Tensor, Tensor]] = token_losses

    def compiled(self) -> Parts:
        """The same, compiled for the one shape that packed batches have."""
        parts = (self.before_attention, self.after_attention, self.token_losses)
        return Parts(*(torch.compile(part, dynamic=False) for part in parts))


class TrainingLayer(nn.Module):
    """One decoder layer, split where attention is inserted."""

    def __init__(self, shape: NetworkShape, parts: Parts) -> None:
        super().__init__()
        self.shape = shape
        self.parts = parts
        hidden, ffn = shape.hidden_size, shape.intermediate_size
        queries = shape.num_attention_heads * shape.head_dim
        keys = shape.num_key_value_heads * shape.head_dim
        self.input_norm = nn.Parameter(torch.ones(hidden))
        self.q_proj = nn.Parameter(_matrix(queries, hidden))
        self.k_proj = nn.Parameter(_matrix(keys, hidden))
        self.v_proj = nn.Parameter(_matrix(keys, hidden))
        self.q_norm = nn.Parameter(torch.ones(shape.head_dim))
        self.k_norm = nn.Parameter(torch.ones(shape.head_dim))
        # Zero, so that at the start every layer passes its input through.
        self.o_proj = nn.Parameter(torch.zeros(hidden, queries))
        self.post_norm = nn.Parameter(torch.ones(hidden))
        self.gate_proj = nn.Parameter(_matrix(ffn, hidden))
        self.up_proj = nn.Parameter(_matrix(ffn, hidden))
        self.down_proj = nn.Parameter(torch.zeros(hidden, ffn))

    def before_attention(self, x: Tensor, rope: Rope) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of x [..., hidden]: [..., num_heads, head_dim]."""
        weights = AttentionWeights(self.input_norm, self.q_proj, self.k_proj, self.v_proj, self.q_norm, self.k_norm)
        return self.parts.before_attention(x, rope, weights, self.shape.rms_norm_eps)

    def after_attention(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output, from its input and what attention found: [..., hidden] each."""
        weights = FeedForwardWeights(self.o_proj, self.post_norm, self.gate_proj, self.up_proj, self.down_proj)
        return self.parts.after_attention(x, attended, weights, self.shape.rms_norm_eps)


def _matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns) * columns**-0.5


def packed_attention(q: Tensor, k: Tensor, v: Tensor, spans: list[PackedSpan]) -> Tensor:
    """Causal attention within each packed conversation: q [num_tokens, num_heads, head_dim], k and v, fewer heads."""
    attend = _flash_span if q.is_cuda else _plain_span
    parts = [attend(q[s.start : s.stop], k[s.start : s.stop], v[s.start : s.stop], s) for s in spans]
    return torch.cat(parts).flatten(1)


def _flash_span(q: Tensor, k: Tensor, v: Tensor, span: PackedSpan) -> Tensor:
    """Computes causal attention within each packed sequence by the flash kernel; q, k and v are [tokens, heads,
    head_dim]."""
    limits, longest = span.cumulative, span.max_length
    out: Tensor = torch.ops.aten._flash_attention_forward(
        q, k, v, limits, limits, longest, longest, 0.0, True, False, scale=q.shape[-1] ** -0.5
    )[0]
    return out


def _plain_span(q: Tensor, k: Tensor, v: Tensor, span: PackedSpan) -> Tensor:
    """Computes causal attention within each packed sequence one by one, on any device; q, k and v are [tokens,
    heads, head_dim]."""
    limits = span.cumulative.tolist()
    parts = []
    for start, stop in pairwise(limits):
        one = (x[start:stop].transpose(0, 1)[None] for x in (q, k, v))
        parts.append(F.scaled_dot_product_attention(*one, is_causal=True, enable_gqa=True)[0].transpose(0, 1))
    return torch.cat(parts)


class Network(nn.Module):
    """The whole model; input and output embeddings are one matrix."""

    def __init__(self, shape: NetworkShape, parts: Parts | None = None) -> None:
        super().__init__()
        self.shape = shape
        self.parts = parts or Parts()
        self.embedding = nn.Parameter(torch.randn(shape.vocab_size, shape.hidden_size) * 0.02)
        self.layers = nn.ModuleList(TrainingLayer(shape, self.parts) for _ in range(shape.num_hidden_layers))
        self.final_norm = nn.Parameter(torch.ones(shape.hidden_size))

    def compile_parts(self) -> None:
        """Compiles the computation apart from attention, for the one shape that packed batches have."""
        self.parts = self.parts.compiled()
        for layer in self.layers:
            assert isinstance(layer, TrainingLayer)
            layer.parts = self.parts

    def embed(self, tokens: Tensor, dtype: torch.dtype) -> Tensor:
        """Input embeddings: [..., hidden]."""
        return F.embedding(tokens, self.embedding).to(dtype)

    def hidden_states(self, tokens: Tensor, positions: Tensor, spans: list[PackedSpan]) -> Tensor:
        """Returns the last layer's output for packed tokens [num_tokens]: [num_tokens, hidden], bfloat16."""
        return self.transform(self.embed(tokens, torch.bfloat16), positions, spans)

    def transform(self, x: Tensor, positions: Tensor, spans: list[PackedSpan]) -> Tensor:
        """Returns the last layer's output for packed embeddings: [num_tokens, hidden] -> the same shape and dtype."""
        rope = rotary(positions, self.shape, x.dtype)
        for layer in self.layers:
            assert isinstance(layer, TrainingLayer)
            q, k, v = layer.before_attention(x, rope)
            x = layer.after_attention(x, packed_attention(q, k, v, spans))
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Logits over the vocabulary, in x's dtype."""
        return self.logits_of(rms_norm(x, self.final_norm, self.shape.rms_norm_eps))

    def logits_of(self, features: Tensor) -> Tensor:
        """The same from hidden states that have been normed."""
        return linear(features, self.embedding)

    def losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Cross-entropy and whether the likeliest token is the target, of hidden states [num_targets, hidden]."""
        return self.parts.token_losses(x, targets, self.final_norm, self.embedding, self.shape.rms_norm_eps)
