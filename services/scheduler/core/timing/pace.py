"""Time per prompt token on this worker, measured on steps that computed prompts."""

from __future__ import annotations

PROMPT_STEP_TOKENS = 64  # minimum tokens per sampling slot for a step to count as a prompt step
SMOOTHING = 0.2


class PromptPace:
    """Smoothed seconds per prompt token; None before the first measurement."""

    def __init__(self) -> None:
        self._seconds_per_token: float | None = None

    def observe(self, num_tokens: int, num_sampled: int, seconds: float) -> None:
        """Records the duration in seconds of a step with `num_tokens` computed tokens and `num_sampled` sampling
        slots; ignores steps with few tokens per sampling slot, which mostly decode."""
        if num_tokens < PROMPT_STEP_TOKENS * max(1, num_sampled):
            return
        measured = seconds / num_tokens
        known = self._seconds_per_token
        self._seconds_per_token = measured if known is None else known + SMOOTHING * (measured - known)

    def seconds_for(self, num_tokens: int) -> float:
        """Returns the minimum seconds until the first token of a prompt with `num_tokens` to compute; 0 without a
        measurement."""
        return 0.0 if self._seconds_per_token is None else num_tokens * self._seconds_per_token
