"""Tokens per second over the last seconds of work, if these are recent."""

from __future__ import annotations

from collections import deque

WINDOW_S = 10.0
IDLE_GAP_S = 1.0  # a longer pause between two steps counts as idle time


class Throughput:
    """Sliding window of (busy time, tokens); idle time does not count."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int]] = deque()
        self._last: float | None = None
        self._busy_s = 0.0
        self._tokens = 0

    def observe(self, tokens: int, now: float) -> None:
        """Records the tokens of a step that returned at `now` (seconds). The time since the previous step counts as
        busy; a step after an idle gap only starts the clock again."""
        gap = 0.0 if self._last is None else now - self._last
        self._last = now
        if gap > IDLE_GAP_S:
            return
        self._steps.append((gap, tokens))
        self._busy_s += gap
        self._tokens += tokens
        while self._busy_s > WINDOW_S and len(self._steps) > 1:
            old_gap, old_tokens = self._steps.popleft()
            self._busy_s -= old_gap
            self._tokens -= old_tokens

    def tokens_per_s(self, now: float) -> float:
        """Returns the tokens per second of the window; 0 if no step has returned for the length of the window."""
        is_idle = self._last is None or now - self._last > WINDOW_S
        return 0.0 if is_idle or not self._busy_s else self._tokens / self._busy_s
