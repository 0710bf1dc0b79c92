"""PEFT saves a model's own embeddings and output head beside adapters of theirs. They are not served: the model has
them. That it has the same is seen from what both make of a few vectors, so that no copy is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_PROBES = 4
TOLERANCE = 0.03  # of what a row usually gives; rounding to bfloat16 takes 0.003, another row is off by about 1


def probes(size: int) -> Tensor:
    """float32 [NUM_PROBES, size], always the same."""
    return torch.randn(NUM_PROBES, size, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """Of a weight [vocab_size, hidden_size]."""

    shape: tuple[int, ...]
    products: Tensor  # float32 [NUM_PROBES, vocab_size] of the probes

    @classmethod
    def from_weight(cls, weight: Tensor) -> BaseCopy:
        return cls(tuple(weight.shape), probes(weight.size(-1)) @ weight.float().reshape(-1, weight.size(-1)).t())

    def equals(self, products: Tensor, rows: range) -> bool:
        """`products` [NUM_PROBES, len(rows)]: what the model's rows give; there may be more."""
        want = self.products[:, rows.start : rows.stop]
        have = products.float().cpu()[:, : want.size(1)]
        return bool(torch.all((want - have).abs() <= TOLERANCE * (want.abs() + want.abs().mean())))
