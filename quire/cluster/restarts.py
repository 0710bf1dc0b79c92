"""Restart delays of a process that died."""

from __future__ import annotations

from collections import deque

FIRST_PAUSE_S = 0.2
MAX_PAUSE_S = 10.0
MAX_QUICK = 20  # quick restarts of ready processes within the window
WINDOW_S = 300.0


class Restarts:
    """Restart policy of one service. A process that was ready and died restarts at once, because others depend on it
    and it usually works again. One that dies before it is ready, or repeatedly, gets growing pauses."""

    def __init__(self) -> None:
        self._num_failures = 0  # in a row
        self._quick: deque[float] = deque()  # times within the window when ready processes died

    def pause_s(self, now: float, *, was_ready: bool) -> float:
        """Returns the pause in seconds before the restart of a process that has just died: short for few deaths of a
        ready process, doubling up to MAX_PAUSE_S otherwise. Counts this death."""
        while self._quick and now - self._quick[0] > WINDOW_S:
            self._quick.popleft()
        if was_ready:
            self._quick.append(now)
        if was_ready and len(self._quick) <= MAX_QUICK:
            self._num_failures = 0
            return FIRST_PAUSE_S
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures, 10), MAX_PAUSE_S)
        self._num_failures += 1
        return pause_s
