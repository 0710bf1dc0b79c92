"""Spreading workers over the schedulers of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quire.shared.prefix_index import SchedulerEntry

Peers = Callable[[], Sequence[SchedulerEntry]]


class WorkerBalancer:
    """Knows the other schedulers from the registry, and whom it has sent to them since it last looked."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._seen: Sequence[SchedulerEntry] = ()
        self._sent: Counter[str] = Counter()

    @property
    def addresses(self) -> list[str]:
        return [peer.address for peer in self._peers()]

    def redirect_target(self, num_workers: int) -> str | None:
        """Where a worker should go instead, when this scheduler has `num_workers` already."""
        best = self._least_loaded()
        if best is None or self._load(best) >= num_workers:
            return None
        return self._send(best)

    def drain_target(self) -> str | None:
        """Where a worker goes when this scheduler leaves."""
        best = self._least_loaded()
        return None if best is None else self._send(best)

    def _least_loaded(self) -> SchedulerEntry | None:
        peers = self._peers()
        if peers is not self._seen:
            self._seen = peers
            self._sent.clear()
        staying = (peer for peer in peers if not peer.draining)  # who leaves has no workers any more, and wants none
        return min(staying, key=self._load, default=None)

    def _load(self, peer: SchedulerEntry) -> int:
        return peer.num_workers + self._sent[peer.id]

    def _send(self, peer: SchedulerEntry) -> str:
        self._sent[peer.id] += 1
        return peer.address
