"""Step times on this worker by the number of computed tokens."""

from __future__ import annotations

SMOOTHING = 0.2


class StepTimes:
    """Step times from returned steps. Prefers estimates that are too short over ones that are too long."""

    def __init__(self) -> None:
        self._known: dict[
            int, tuple[float, float]
        ] = {}  # seconds per token by size class: smoothed, and of the last step

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Records a returned step of `num_tokens` tokens, whose seconds per token are smoothed by the bit length of
        that number."""
        rate = seconds / num_tokens
        smoothed, _ = self._known.get(num_tokens.bit_length(), (rate, rate))
        self._known[num_tokens.bit_length()] = (smoothed + SMOOTHING * (rate - smoothed), rate)

    def expected(self, num_tokens: int) -> float:
        """Returns the expected seconds; 0 if no step of about that size has been measured."""
        known = self._known.get(num_tokens.bit_length())
        return 0.0 if known is None else num_tokens * min(known)
