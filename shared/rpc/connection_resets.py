"""Closes connections whose client resets calls at an abusive rate (rapid reset, CVE-2023-44487).

A reset frees the connection's slot for the next call at once, while the server still has the work of the last one,
so the limit of concurrent calls has no effect. gRPC's own protection counts calls that have just ended, also those
of well-behaved clients; resets are therefore counted here, in one leaky bucket per connection.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from quire.shared.logs import logger
from quire.shared.rpc import peer_sockets

log = logger("grpc")

BURST = 500  # resets in a short time: several times the maximum of concurrent calls
PER_SECOND = 100.0  # resets that the bucket drains
MOST_REMEMBERED = 4_096  # connections


@dataclass(slots=True)
class ResetBucket:
    """Leaky bucket of one connection: resets that have not drained yet, and the time of the last one."""

    level: float
    seen_s: float


class ConnectionResets:
    """Counts the resets of each connection to one port."""

    def __init__(
        self,
        close: Callable[[str], bool] = peer_sockets.close,
        clock: Callable[[], float] = time.monotonic,
        burst: int = BURST,
    ) -> None:
        """`close`: closes the connection of a peer and returns whether it existed."""
        self._close = close
        self._clock = clock
        self._burst = burst
        self._buckets: OrderedDict[str, ResetBucket] = OrderedDict()

    def add(self, peer: str) -> None:
        """Counts a call that its client has reset, and closes the connection when its bucket exceeds the burst.
        `peer`: as gRPC names the remote end."""
        bucket = self._bucket(peer)
        bucket.level += 1
        if bucket.level > self._burst:
            self.end(peer, f"more than {self._burst} calls were reset")

    def end(self, peer: str, reason: str) -> None:
        """Closes the connection to a peer, if it still exists, and logs the reason."""
        self._buckets.pop(peer, None)
        if self._close(peer):
            log.warning("closed a connection", peer=peer, reason=reason)

    def _bucket(self, peer: str) -> ResetBucket:
        """Returns the bucket of a peer, drained by PER_SECOND since its last reset; creates it if needed and forgets
        the least recently seen peer beyond MOST_REMEMBERED."""
        now = self._clock()
        bucket = self._buckets.setdefault(peer, ResetBucket(0.0, now))
        self._buckets.move_to_end(peer)
        bucket.level = max(0.0, bucket.level - PER_SECOND * (now - bucket.seen_s))
        bucket.seen_s = now
        if len(self._buckets) > MOST_REMEMBERED:
            self._buckets.popitem(last=False)
        return bucket
