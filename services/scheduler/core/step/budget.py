"""What one step may cost."""

from __future__ import annotations


class TokenBudget:
    """Tokens left to give out in this step."""

    def __init__(self, tokens: int) -> None:
        self.left = tokens

    def try_add(self, wanted: int, at_most: int) -> int:
        """Takes up to `wanted` tokens, not more than `at_most`; returns how many were granted."""
        granted = min(wanted, at_most, self.left)
        self.left -= granted
        return granted

    def try_all(self, wanted: int) -> bool:
        """Takes `wanted` tokens if there are as many."""
        if wanted > self.left:
            return False
        self.left -= wanted
        return True
