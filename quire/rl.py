"""Functions for reinforcement learning between an engine and a trainer. Requires torch."""

from __future__ import annotations

from typing import Any


def logprobs_from_logits(logits: Any, labels: Any) -> Any:
    """Returns the log-probability of each label, comparable to `rollout_log_probs` at temperature 1: [..., length]
    from logits [..., length, vocabulary] and token ids [..., length], without a second tensor of the logits' size if
    no gradient is required."""
    chosen = logits.gather(-1, labels[..., None])[..., 0]
    return chosen.float() - logits.float().logsumexp(-1)
