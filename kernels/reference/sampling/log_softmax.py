"""Logits to log-probabilities."""

from __future__ import annotations

import torch


def log_softmax(logits: torch.Tensor) -> torch.Tensor:
    """logits - log(sum(exp(logits))) of each row of float32 [num_rows, vocab_size]; a copy."""
    return logits.log_softmax(dim=1)
