"""Recent throughput of a cluster, for a curve."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from quire.shared.pb.admin.v1 import admin_pb2 as pb

BARS = "▁▂▃▄▅▆▇█"


class History:
    """Generated tokens per second between consecutive samples, over all workers."""

    def __init__(self, length: int = 240) -> None:
        self.rates: deque[float] = deque(maxlen=length)
        self._generated: dict[tuple[str, int], int] = {}  # by worker and epoch, at the last sample
        self._looked_s: float | None = None

    def add(self, services: Sequence[pb.ServiceStatus], now: float) -> None:
        """Adds the throughput since the last call, in tokens per second; workers that are new or restarted count
        from the next one on."""
        workers = [service for service in services if service.role == pb.ROLE_WORKER]
        generated = {(worker.id, worker.epoch): worker.work.generated_tokens for worker in workers}
        if self._looked_s is not None:
            known = self._generated
            more = sum(max(0, count - known[worker]) for worker, count in generated.items() if worker in known)
            self.rates.append(more / max(now - self._looked_s, 1e-3))
        self._generated, self._looked_s = generated, now

    def curve(self, width: int) -> str:
        """Returns the last `width` rates as bars scaled to the maximum."""
        shown = list(self.rates)[-width:]
        highest = max(shown, default=0.0)
        if not highest:
            return BARS[0] * len(shown)
        return "".join(BARS[round(rate / highest * (len(BARS) - 1))] for rate in shown)
