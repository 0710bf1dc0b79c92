"""Assigns consecutive metrics ports to a local cluster, so that Prometheus is configured once."""

from __future__ import annotations

import contextlib

from quire.cluster.endpoints import LOOPBACK, Endpoints
from quire.shared.errors import FailedPrecondition

DEFAULT = 9101


class MetricsPorts:
    """Ports reserved from start to end; the first is that of the combined page."""

    def __init__(self, endpoints: Endpoints, first: int | None) -> None:
        """Reserves the cluster's metrics port. `first` is the first port (0: any free ones; None: DEFAULT and the
        following ones as far as they are free)."""
        self._endpoints = endpoints
        self._next = DEFAULT if first is None else first
        self._may_differ = first is None
        self.of_cluster = self.hold()

    def hold(self) -> int:
        """Reserves the next port. Raises FailedPrecondition if it was requested explicitly and another process uses
        it."""
        port, self._next = self._next, self._next + 1 if self._next else 0
        if self._may_differ:
            with contextlib.suppress(FailedPrecondition):
                return self._endpoints.hold_port("metrics_port", LOOPBACK, port)
            port = 0
        return self._endpoints.hold_port("metrics_port", LOOPBACK, port)
