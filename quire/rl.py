"""What loops of reinforcement learning do between an engine and a trainer. Needs torch."""

from __future__ import annotations

from typing import Any


def logprobs_from_logits(logits: Any, labels: Any) -> Any:
    """The log-probability of each label, as samples have it in `rollout_log_probs` at temperature 1: [..., length] of
    logits [..., length, vocabulary] and token ids [..., length], without a second tensor of the logits' size where
    their gradient is not asked for."""
    chosen = logits.gather(-1, labels[..., None])[..., 0]
    return chosen.float() - logits.float().logsumexp(-1)
