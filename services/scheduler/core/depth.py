"""How many steps may be under way on a worker at a time."""

from __future__ import annotations

USUAL = 2  # the worker has the next step before it ends one
MOST = 3
# Shorter steps end before the way there and back is over (1 ms through both services on an H200's host): a third one
# under way hides it. For longer ones it would only keep newcomers waiting.
SHORT_STEP_S = 0.0015
SMOOTHING = 0.2


class Depth:
    """A fixed number, or by how long steps take."""

    def __init__(self, fixed: int) -> None:
        """`fixed`: 0: by how long steps take."""
        self._fixed = fixed
        self._step_s = SHORT_STEP_S  # smoothed

    def learn(self, seconds: float) -> None:
        """A step took so long, not counting what it waited for the one before."""
        self._step_s += SMOOTHING * (seconds - self._step_s)

    @property
    def most(self) -> int:
        """Steps that may be under way now."""
        return self._fixed or (MOST if self._step_s < SHORT_STEP_S else USUAL)

    @staticmethod
    def most_ever(fixed: int) -> int:
        return fixed or MOST
