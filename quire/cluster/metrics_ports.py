"""Which ports of a local cluster answer with metrics: one behind the other, told to Prometheus once."""

from __future__ import annotations

import contextlib

from quire.cluster.endpoints import LOOPBACK, Endpoints
from quire.shared.errors import FailedPrecondition

DEFAULT = 9101


class MetricsPorts:
    """Held from start to end; the first is that of the whole cluster."""

    def __init__(self, endpoints: Endpoints, first: int | None) -> None:
        """`first`: 0 for any free ones; None for DEFAULT and those behind it, as far as they are free."""
        self._endpoints = endpoints
        self._next = DEFAULT if first is None else first
        self._may_differ = first is None
        self.of_cluster = self.hold()

    def hold(self) -> int:
        """The next one. Raises FailedPrecondition if another process has it, and it was asked for."""
        port, self._next = self._next, self._next + 1 if self._next else 0
        if self._may_differ:
            with contextlib.suppress(FailedPrecondition):
                return self._endpoints.hold_port("metrics_port", LOOPBACK, port)
            port = 0
        return self._endpoints.hold_port("metrics_port", LOOPBACK, port)
