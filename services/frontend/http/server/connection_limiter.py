"""Limits on HTTP connections: their number, and the time for headers, body, and reading the answer."""

from __future__ import annotations

import asyncio
import resource
from collections import Counter
from collections.abc import Callable

from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.settings.connection_limits import ConnectionLimits

log = logger("http")

MAX_DESCRIPTORS = 65_536  # even if the system allows more
MIN_CONNECTIONS = 64


def descriptors() -> int:
    """Raises the process's limit on open descriptors as far as permitted, and returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        return wanted
    return wanted if soft == resource.RLIM_INFINITY else soft


class ConnectionLimiter:
    """Counts the connections of all clients. Its limits leave descriptors free to answer further clients with a
    refusal."""

    def __init__(self, limits: ConnectionLimits, num_descriptors: int, metrics: FrontendMetrics) -> None:
        """Divides the free descriptors between gRPC and HTTP. `num_descriptors`: the process's limit."""
        self.limits = limits
        free = max(MIN_CONNECTIONS, num_descriptors - limits.reserved)
        self.max_grpc = min(limits.grpc, free // 3)
        self._max_open = free - self.max_grpc
        self._max_per_address = min(limits.per_address, max(1, self._max_open // 2))
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
        """Limits under TLS, in total and per address: they include handshakes and some connections that will be
        refused."""
        spare = self.limits.reserved // 2
        return self._max_open + spare, self._max_per_address + spare

    @property
    def num_open(self) -> int:
        """Number of open HTTP connections."""
        return self._num

    def acquire(self, address: str) -> bool:
        """Counts a new connection; returns False if a limit is reached. If True, release() must follow."""
        if self._num >= self._max_open or self._of[address] >= self._max_per_address:
            self._metrics.closed_connections["too_many"].inc()
            return False
        self._num += 1
        self._of[address] += 1
        return True

    def release(self, address: str) -> None:
        """Ends a connection counted by acquire()."""
        self._num -= 1
        self._of[address] -= 1
        if not self._of[address]:
            del self._of[address]

    def acquire_linger(self) -> bool:
        """Whether a refused connection may stay open until it has read the refusal; if True, release_linger() must
        follow."""
        if self._num_lingering >= self.limits.reserved // 4:
            return False
        self._num_lingering += 1
        return True

    def release_linger(self) -> None:
        self._num_lingering -= 1

    def count_closed(self, reason: str) -> None:
        """Counts a connection closed for a reason, such as being too slow."""
        self._metrics.closed_connections[reason].inc()


class DeadlineTimer:
    """A single timer whose deadline is often moved: setting it is cheap, and the loop's timer is rescheduled only when
    it fires too early. It is set several times per call and hardly ever expires."""

    __slots__ = ("_at_s", "_loop", "_then", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._timer: asyncio.TimerHandle | None = None
        self._then: Callable[[], None] | None = None
        self._at_s = 0.0

    def set(self, seconds: float, then: Callable[[], None]) -> None:
        """Replaces the deadline; `then` is called once, in `seconds`, unless it is replaced or cleared before."""
        self._at_s, self._then = self._loop.time() + seconds, then
        if self._timer is not None and self._timer.when() > self._at_s:
            self._timer.cancel()
            self._timer = None
        if self._timer is None:
            self._timer = self._loop.call_at(self._at_s, self._on_timer)

    def clear(self) -> None:
        """Removes the deadline; the loop's timer may still run."""
        self._then = None

    def close(self) -> None:
        """Removes the deadline and cancels the loop's timer; for the end of the connection."""
        self._then = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _on_timer(self) -> None:
        """Calls the callback if the deadline has passed; reschedules the timer if the deadline was moved."""
        self._timer = None
        if self._then is None:
            return
        if self._loop.time() < self._at_s:
            self._timer = self._loop.call_at(self._at_s, self._on_timer)
            return
        then, self._then = self._then, None
        then()
