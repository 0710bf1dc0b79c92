"""Log-probabilities of logits, row by row."""

from __future__ import annotations

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """Computes logits - log(sum(exp(logits))) of each row of float32 [num_rows, vocab_size], as a copy."""
    return logits.log_softmax(dim=1)
