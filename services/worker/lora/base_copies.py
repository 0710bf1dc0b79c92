"""Checks copies of a model's own embeddings and output head, which PEFT saves together with their adapters.

The copies are not served. Products with a few random vectors tell whether they equal the model's weights, so that no
copy is kept.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

NUM_PROBES = 4
TOLERANCE = 0.03  # relative to a row's usual product; rounding to bfloat16 causes 0.003, another row about 1


def probes(size: int) -> Tensor:
    """Returns fixed random vectors, float32 [NUM_PROBES, size]."""
    return torch.randn(NUM_PROBES, size, generator=torch.Generator().manual_seed(0))


@dataclass(frozen=True, slots=True)
class BaseCopy:
    """Fingerprint of a weight [vocab_size, hidden_size]: its shape and its products with the probes."""

    shape: tuple[int, ...]
    products: Tensor  # float32 [NUM_PROBES, vocab_size] products with the probes

    @classmethod
    def from_weight(cls, weight: Tensor) -> BaseCopy:
        return cls(tuple(weight.shape), probes(weight.size(-1)) @ weight.float().reshape(-1, weight.size(-1)).t())

    def equals(self, products: Tensor, rows: range) -> bool:
        """Returns whether `products` [NUM_PROBES, >= len(rows)], those of the model's `rows`, agree with the
        fingerprint within TOLERANCE; waits for the device."""
        expected = self.products[:, rows.start : rows.stop]
        actual = products.float().cpu()[:, : expected.size(1)]
        return bool(torch.all((expected - actual).abs() <= TOLERANCE * (expected.abs() + expected.abs().mean())))
