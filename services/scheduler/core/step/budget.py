"""Token budget of one step."""

from __future__ import annotations


class TokenBudget:
    """Tokens that can still be scheduled in this step."""

    def __init__(self, tokens: int) -> None:
        self.remaining = tokens

    def try_add(self, wanted: int, at_most: int) -> int:
        """Takes up to `wanted` tokens, at most `at_most`; returns how many were granted."""
        granted = min(wanted, at_most, self.remaining)
        self.remaining -= granted
        return granted

    def try_take(self, wanted: int) -> bool:
        """Takes `wanted` tokens if that many are left; returns whether it did."""
        if wanted > self.remaining:
            return False
        self.remaining -= wanted
        return True
