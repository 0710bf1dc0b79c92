"""How soon a process that died starts again."""

from __future__ import annotations

from collections import deque

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 10.0
MOST_QUICK = 20  # of processes that had been ready, within the window: whoever dies that often will again
WINDOW_S = 300.0


class Restarts:
    """Those of one service. A process that got ready and died starts again at once: others wait for it, and it works
    as a rule. One that dies before it is ready, or again and again, has longer and longer pauses."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._quick: deque[float] = deque()  # when processes died that had been ready, within the window

    def pause_s(self, now: float, *, was_ready: bool) -> float:
        """For one that has died now."""
        while self._quick and now - self._quick[0] > WINDOW_S:
            self._quick.popleft()
        if was_ready:
            self._quick.append(now)
        if was_ready and len(self._quick) <= MOST_QUICK:
            self._num_failures = 0
            return FIRST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 10), LONGEST_PAUSE_S)
        self._num_failures += 1
        return pause_s
