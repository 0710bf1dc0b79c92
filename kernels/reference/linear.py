"""Matrix products with weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional


@dataclass(frozen=True)
class LinearWeight:
    """A weight as `linear` wants it. Opaque to callers: each package packs in its own way."""

    weight: torch.Tensor  # [out_features, in_features]
    bias: torch.Tensor | None  # [out_features]


def prepare_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> LinearWeight:
    """Packs `weight` [out_features, in_features] and `bias` [out_features], once, when the model is loaded.

    May keep the tensors it is given or copies of them; the caller forgets them.
    """
    return LinearWeight(weight, bias)


def linear(x: torch.Tensor, weight: LinearWeight) -> torch.Tensor:
    """x @ weight.T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype.

    Products add up in float32 or better, also for 16-bit inputs.
    """
    return functional.linear(x, weight.weight, weight.bias)
