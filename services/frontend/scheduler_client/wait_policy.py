"""How long work waits while no worker can run it."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WAITS = 5  # while schedulers come back again and again without staying


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """With a scheduler that has no worker, one may be on its way: somebody saw the work that waits, and starts it."""

    outage_s: float  # while there is no scheduler, or it has just come
    start_s: float = 0.0  # for the first worker of a scheduler that is there; at least as long as in an outage

    def wait_s(self, *, has_scheduler: bool) -> float:
        """From now on."""
        return max(self.outage_s, self.start_s) if has_scheduler else self.outage_s

    @property
    def max_wait_s(self) -> float:
        """In all, whatever comes and goes meanwhile."""
        return max(MAX_WAITS * self.outage_s, self.start_s)

    def deadline_s(self, began_s: float, seen_s: float, *, has_scheduler: bool) -> float:
        """For work that waits since `began_s`, where a scheduler was seen to come or go last at `seen_s`."""
        ends_s = max(began_s, seen_s) + self.outage_s
        if has_scheduler:
            ends_s = max(ends_s, began_s + self.start_s)
        return min(ends_s, began_s + self.max_wait_s)
