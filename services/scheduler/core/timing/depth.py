"""How many steps may be under way on a worker at a time, and from when on."""

from __future__ import annotations

import math

USUAL = 2  # the worker has the next step before it ends one
MOST = 3
# Shorter steps end before the way there and back is over (1 ms through both services on an H200's host): a third one
# under way hides it. For longer ones it would only keep newcomers waiting.
SHORT_STEP_S = 0.0015
SMOOTHING = 0.2
# The step behind a long one is planned when that is about to end: whoever comes until then is in it. (All at once,
# 32 prompts for a CPU: the first one, then the few that had come a moment later, then all others behind both.)
LONG_STEP_S = 0.02
LEAD = 0.2  # of the step's expected time: time to plan, to send, to get ready, and for a step that ends early
# With 6 ms, 256 prompts behind a shared prefix of 2,048 took a fifth longer where steps take 24 ms (a simulated worker
# with an H200's times); a GPU's worker also launches such steps kernel by kernel, for 9 to 15 ms.
LEAST_LEAD_S = 0.02


class PipelineDepth:
    """A fixed number, or by how long steps take. A worker with several stages has one for each, and the next."""

    def __init__(self, fixed: int, num_stages: int = 1) -> None:
        """`fixed`: 0: by how long steps take."""
        self._fixed, self.num_stages = fixed, num_stages
        self._step_s = SHORT_STEP_S  # smoothed

    def observe(self, seconds: float) -> None:
        """A step took so long, not counting what it waited for the one before."""
        self._step_s += SMOOTHING * (seconds - self._step_s)

    @property
    def max_steps(self) -> int:
        """Steps that may be under way now."""
        if self._fixed:
            return max(self._fixed, self.num_stages)
        return (MOST if self._step_s < SHORT_STEP_S else USUAL) + self.num_stages - 1

    def next_at(self, begun: float, expected_s: float) -> float:
        """Not to be planned before: the step behind one for each stage, of which the oldest began at `begun` and takes
        about `expected_s`."""
        if self._fixed or expected_s < LONG_STEP_S:
            return -math.inf
        return begun + expected_s - max(LEAST_LEAD_S, LEAD * expected_s)

    @staticmethod
    def max_steps_for(fixed: int, num_stages: int = 1) -> int:
        return max(fixed, num_stages) if fixed else MOST + num_stages - 1
