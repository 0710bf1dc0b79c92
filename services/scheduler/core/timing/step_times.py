"""How long steps take on this worker, by how many tokens they compute."""

from __future__ import annotations

SMOOTHING = 0.2


class StepTimes:
    """Learns from the steps that have returned. Rather says too little than too much."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float]] = {}  # by size: seconds per token, smoothed and in the last step

    def observe(self, num_tokens: int, seconds: float) -> None:
        rate = seconds / num_tokens
        smoothed, _ = self._known.get(num_tokens.bit_length(), (rate, rate))
        self._known[num_tokens.bit_length()] = (smoothed + SMOOTHING * (rate - smoothed), rate)

    def expected(self, num_tokens: int) -> float:
        """Seconds; 0 while no step of about that size has been seen."""
        known = self._known.get(num_tokens.bit_length())
        return 0.0 if known is None else num_tokens * min(known)
