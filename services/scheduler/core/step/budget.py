"""What one step may cost."""

from __future__ import annotations


class TokenBudget:
    """Tokens left to give out in this step."""

    def __init__(self, tokens: int) -> None:
        self.remaining = tokens

    def try_add(self, wanted: int, at_most: int) -> int:
        """Takes up to `wanted` tokens, not more than `at_most`; returns how many were granted."""
        granted = min(wanted, at_most, self.remaining)
        self.remaining -= granted
        return granted

    def try_take(self, wanted: int) -> bool:
        """Takes `wanted` tokens if there are as many."""
        if wanted > self.remaining:
            return False
        self.remaining -= wanted
        return True
