"""Distribution of workers over the schedulers of a cluster."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from quire.shared.prefix_index import SchedulerEntry

Peers = Callable[[], Sequence[SchedulerEntry]]


class WorkerBalancer:
    """Knows the other schedulers from the registry, and counts the workers that it has redirected to them since the
    last registry update."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._known_peers: Sequence[SchedulerEntry] = ()
        self._redirected: Counter[str] = Counter()

    @property
    def addresses(self) -> list[str]:
        return [peer.address for peer in self._peers()]

    def redirect_target(self, num_workers: int) -> str | None:
        """Returns the address of a less loaded scheduler for a new worker, and counts the worker there; None if this
        scheduler keeps it. `num_workers`: workers of this scheduler."""
        best = self._least_loaded()
        if best is None or self._load(best) >= num_workers:
            return None
        return self._redirect(best)

    def drain_target(self) -> str | None:
        """Returns the address that a worker is redirected to when this scheduler drains, or None."""
        best = self._least_loaded()
        return None if best is None else self._redirect(best)

    def _least_loaded(self) -> SchedulerEntry | None:
        """Returns the peer with the fewest workers, redirected ones included, that is not draining; None if there is
        none. Resets the counts when the registry has been read again."""
        peers = self._peers()
        if peers is not self._known_peers:
            self._known_peers = peers
            self._redirected.clear()
        staying = (
            peer for peer in peers if not peer.draining
        )  # a draining scheduler has no workers left and accepts none
        return min(staying, key=self._load, default=None)

    def _load(self, peer: SchedulerEntry) -> int:
        return peer.num_workers + self._redirected[peer.id]

    def _redirect(self, peer: SchedulerEntry) -> str:
        self._redirected[peer.id] += 1
        return peer.address
