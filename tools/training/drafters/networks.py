"""Drafters for a model: a smaller model of its own, an EAGLE head, Medusa heads.

All of them learn from the model's distribution over the next token, not from the text's single token, because the
acceptance rate depends on agreement with the model.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tools.training.network import (
    NetworkShape,
    PackedSpan,
    Parts,
    Rope,
    TrainingLayer,
    linear,
    packed_attention,
    rms_norm,
)

DRAFT_SHAPE = NetworkShape(
    hidden_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=384
)
"""0.9 million parameters. Two layers are the fewest that can find an earlier occurrence and say what followed it."""

NUM_MEDUSA_HEADS = 4


def features_of(x: Tensor, final_norm: Tensor, eps: float) -> Tensor:
    """Returns the heads' input: the model's last hidden states as they enter the output embedding."""
    return rms_norm(x, final_norm, eps)


class EagleHead(nn.Module):
    """One decoder layer that continues the model's features (EAGLE, arXiv 2401.15077).

    From the feature of position i and the token of position i + 1 it makes a feature for position i + 1, whose product
    with the model's output embedding says which token comes at position i + 2. Both inputs are normed first, as in
    EAGLE-3 (arXiv 2503.01840).
    """

    def __init__(self, target: NetworkShape, parts: Parts) -> None:
        super().__init__()
        self.shape = replace(target, num_hidden_layers=1)
        hidden = target.hidden_size
        self.embed_norm = nn.Parameter(torch.ones(hidden))
        self.hidden_norm = nn.Parameter(torch.ones(hidden))
        self.fc = nn.Parameter(torch.randn(hidden, 2 * hidden) * (2 * hidden) ** -0.5)
        self.layers = nn.ModuleList([TrainingLayer(self.shape, parts)])
        self.final_norm = nn.Parameter(torch.ones(hidden))

    def forward(self, embedded: Tensor, features: Tensor, rope: Rope, spans: list[PackedSpan]) -> Tensor:
        """Returns the features that follow: from the features at each position and `embedded`, the input embeddings
        of the next tokens. All are [num_tokens, hidden]."""
        eps = self.shape.rms_norm_eps
        both = (rms_norm(embedded, self.embed_norm, eps), rms_norm(features, self.hidden_norm, eps))
        x = linear(torch.cat(both, dim=-1), self.fc)
        layer = self.layers[0]
        assert isinstance(layer, TrainingLayer)
        q, k, v = layer.before_attention(x, rope)
        x = layer.after_attention(x, packed_attention(q, k, v, spans))
        return features_of(x, self.final_norm, eps)


class MedusaHeads(nn.Module):
    """Head k changes the feature of position i so that it says which token comes at i + 1 + k (arXiv 2401.10774)."""

    def __init__(self, hidden_size: int, num_heads: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.zeros(hidden_size, hidden_size) for _ in range(num_heads)])
        self.biases = nn.ParameterList([torch.zeros(hidden_size) for _ in range(num_heads)])

    def forward(self, features: Tensor, head: int) -> Tensor:
        """Features [..., hidden] of what comes `head` + 1 tokens later than the next one."""
        return features + F.silu(linear(features, self.weights[head]) + self.biases[head].to(features.dtype))


def soft_losses(features: Tensor, embedding: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Returns, per target, the cross-entropy with the teacher's distribution and whether both have the same
    favourite. `features` are [num_targets, hidden], the logits `teacher` [num_targets, vocab_size]."""
    logits, teacher = linear(features, embedding).float(), teacher.float()
    expected = (teacher.softmax(dim=-1) * logits).sum(dim=-1)
    return logits.logsumexp(dim=-1) - expected, logits.argmax(dim=-1) == teacher.argmax(dim=-1)
