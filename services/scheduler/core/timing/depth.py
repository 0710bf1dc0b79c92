"""Number of steps that may be in flight on a worker at a time, and the time from which the next one may be planned."""

from __future__ import annotations

import math

USUAL = 2  # the worker has the next step before it finishes one
MOST = 3
# Shorter steps end before the round trip is over (1 ms through both services on an H200's host): a third step in flight
# hides it. For longer steps it would only delay new sequences.
SHORT_STEP_S = 0.0015
SMOOTHING = 0.2
# The step after a long one is planned shortly before that one ends, so that it includes every sequence that arrives
# until then. (Planned at once, 32 prompts on a CPU were computed as: the first one, then the few that had arrived a
# moment later, then all others after both.)
LONG_STEP_S = 0.02
LEAD = 0.2  # share of the step's expected time: time to plan, send and prepare, and for steps that end early
# With 6 ms, 256 prompts with a shared prefix of 2,048 tokens took a fifth longer where steps take 24 ms (a simulated
# worker with an H200's times); a GPU worker also launches such steps kernel by kernel, for 9 to 15 ms.
LEAST_LEAD_S = 0.02


class PipelineDepth:
    """Fixed depth, or one adapted to the step time. A worker with several pipeline stages has one step for each stage,
    plus the next one."""

    def __init__(self, fixed: int, num_stages: int = 1) -> None:
        """`fixed`: 0: adapted to the step time."""
        self._fixed, self.num_stages = fixed, num_stages
        self._step_s = SHORT_STEP_S  # smoothed

    def observe(self, seconds: float) -> None:
        """Records the duration of a step, without the time that it waited for the one before."""
        self._step_s += SMOOTHING * (seconds - self._step_s)

    @property
    def max_steps(self) -> int:
        """Number of steps that may be in flight now."""
        if self._fixed:
            return max(self._fixed, self.num_stages)
        return (MOST if self._step_s < SHORT_STEP_S else USUAL) + self.num_stages - 1

    def next_at(self, begun: float, expected_s: float) -> float:
        """Returns the time before which the step after those in flight is not planned. The oldest one started at
        `begun` and takes about `expected_s`."""
        if self._fixed or expected_s < LONG_STEP_S:
            return -math.inf
        return begun + expected_s - max(LEAST_LEAD_S, LEAD * expected_s)

    @staticmethod
    def max_steps_for(fixed: int, num_stages: int = 1) -> int:
        return max(fixed, num_stages) if fixed else MOST + num_stages - 1
