"""Connections: how many there may be, and the time that each has for headers, a body, and for taking its answer."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable

from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.settings.connection_limits import ConnectionLimits

log = logger("http")

MOST = 65_536  # whatever number of descriptors the system allows
LEAST = 64


def descriptors() -> int:
    """As many as this process may have; raises the limit as far as that is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(hard, MOST)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


class ConnectionLimiter:
    """Of all clients. So many are kept that there are descriptors left for a new client's refusal."""

    def __init__(self, limits: ConnectionLimits, num_descriptors: int, metrics: FrontendMetrics) -> None:
        self.limits = limits
        free = max(LEAST, num_descriptors - limits.reserved)
        self.max_grpc = min(limits.grpc, free // 3)
        self._most = free - self.max_grpc
        self._most_of_one = min(limits.per_address, max(1, self._most // 2))
        self._metrics = metrics
        self._num = 0
        self._num_lingering = 0
        self._of: Counter[str] = Counter()  # by address
        metrics.connections.set_function(lambda: self.num_open)

    @property
    def max_grpc_per_address(self) -> int:
        return min(self.limits.per_address, max(1, self.max_grpc // 2))

    @property
    def max_open(self) -> tuple[int, int]:
        """In all and of one address, under TLS: those in the middle of a handshake, and some that are to be told that
        they are too many."""
        spare = self.limits.reserved // 2
        return self._most + spare, self._most_of_one + spare

    @property
    def num_open(self) -> int:
        """Of HTTP, at present."""
        return self._num

    def acquire(self, address: str) -> bool:
        """Whether there is room for one more; if so, leave() has to follow."""
        if self._num >= self._most or self._of[address] >= self._most_of_one:
            self._metrics.closed_connections["too_many"].inc()
            return False
        self._num += 1
        self._of[address] += 1
        return True

    def release(self, address: str) -> None:
        self._num -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def acquire_linger(self) -> bool:
        """Whether one for which there was no room may stay until it has heard so; if so, lingered() has to follow."""
        if self._num_lingering >= self.limits.reserved // 4:
            return False
        self._num_lingering += 1
        return True

    def release_linger(self) -> None:
        self._num_lingering -= 1

    def count_closed(self, reason: str) -> None:
        """One that was too slow, or said too much."""
        self._metrics.closed_connections[reason].inc()


class DeadlineTimer:
    """At most one at a time; the last one set counts. It is set several times for every call and hardly ever passes, so
    the loop's timer goes on from one to the next, and looks, when it rings, whether it was meant."""

    __slots__ = ("_at_s", "_loop", "_then", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._then: Callable[[], None] | None = None
        self._at_s = 0.0

    def set(self, seconds: float, then: Callable[[], None]) -> None:
        self._at_s, self._then = self._loop.time() + seconds, then
        if self._timer is not None and self._timer.when() > self._at_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._at_s, self._ring)

    def clear(self) -> None:
        """Until it is set again."""
        self._then = None

    def close(self) -> None:
        """For good."""
        self._then = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._then is None:
            return
        if self._loop.time() < self._at_s:
            self._timer = self._loop.call_at(self._at_s, self._ring)
            return
        then, self._then = self._then, None
        then()
