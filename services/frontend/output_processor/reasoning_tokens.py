"""Number of an answer's tokens that are reasoning: those up to the token that ends it."""

from __future__ import annotations

from collections.abc import Sequence


class ReasoningTokenCounter:
    """Counter of one sample's reasoning tokens."""

    __slots__ = ("_end", "_is_over", "_num_seen", "_reasons")

    def __init__(self, end: int | None) -> None:
        """Starts counting from the first token.

        `end`: the token that ends reasoning; None where a text ends it, and nothing is counted.
        """
        self._end = end
        self._is_over = end is None
        self._num_seen = 0
        self._reasons = False

    def count(self, token_ids: Sequence[int], *, has_reasoned: bool, has_called: bool) -> None:
        """Counts the tokens of one step.

        `has_called`: a tool call has ended the reasoning; tokens that arrive together with it count as reasoning.
        """
        self._reasons = has_reasoned
        if self._is_over:
            return
        self._is_over = self._end in token_ids
        self._num_seen += token_ids.index(self._end) + 1 if self._is_over and self._end is not None else len(token_ids)
        self._is_over = self._is_over or has_called

    @property
    def num_tokens(self) -> int:
        return self._num_seen if self._reasons else 0
