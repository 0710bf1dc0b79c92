"""Token budget of one step."""

from __future__ import annotations


class TokenBudget:
    """Tokens that can still be scheduled in this step."""

    def __init__(self, tokens: int) -> None:
        self.remaining = tokens
        self._withheld = 0  # tokens that the worker could compute as well

    def limit(self, tokens: int) -> None:
        """Limits what remains to `tokens`; try_take_whole() may exceed the limit."""
        excess = max(0, self.remaining - tokens)
        self.remaining -= excess
        self._withheld += excess

    def try_add(self, wanted: int, at_most: int) -> int:
        """Takes up to `wanted` tokens, at most `at_most`; returns how many were granted."""
        granted = min(wanted, at_most, self.remaining)
        self.remaining -= granted
        return granted

    def has_room(self, wanted: int) -> bool:
        """Returns whether the worker can compute `wanted` more tokens in this step, whatever the limit is."""
        return wanted <= self.remaining + self._withheld

    def try_take_whole(self, wanted: int) -> bool:
        """Takes `wanted` tokens if the worker can compute that many more in this step; returns whether it did."""
        if not self.has_room(wanted):
            return False
        excess = max(0, wanted - self.remaining)
        self.remaining -= wanted - excess
        self._withheld -= excess
        return True

    def try_take(self, wanted: int) -> bool:
        """Takes `wanted` tokens if that many are left; returns whether it did."""
        if wanted > self.remaining:
            return False
        self.remaining -= wanted
        return True
