"""How long requests wait while no worker can run them."""

from __future__ import annotations

from dataclasses import dataclass

MAX_WAITS = 5  # outage times in total, if schedulers keep reconnecting and leaving


@dataclass(frozen=True, slots=True)
class WaitPolicy:
    """Times in seconds that a request may wait without a usable worker. A scheduler without workers justifies a longer
    wait: an autoscaler may be starting one."""

    outage_s: float  # without a scheduler, or right after one connected
    start_s: float = 0.0  # for the first worker of a connected scheduler

    def wait_s(self, *, has_scheduler: bool) -> float:
        """Returns how long a request that starts waiting now may wait."""
        return max(self.outage_s, self.start_s) if has_scheduler else self.outage_s

    @property
    def max_wait_s(self) -> float:
        """Upper bound on the wait of one request, however often it is extended."""
        return max(MAX_WAITS * self.outage_s, self.start_s)

    def deadline_s(self, began_s: float, seen_s: float, *, has_scheduler: bool) -> float:
        """Returns when a request that waits since `began_s` gives up. `seen_s`: when a scheduler last connected or
        disconnected."""
        ends_s = max(began_s, seen_s) + self.outage_s
        if has_scheduler:
            ends_s = max(ends_s, began_s + self.start_s)
        return min(ends_s, began_s + self.max_wait_s)
