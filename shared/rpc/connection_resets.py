"""Closes connections whose client resets calls faster than a client that keeps the rules would (CVE-2023-44487).

A reset makes room for the connection's next call at once, while the server still has all the work of the last one: what
bounds calls under way bounds nothing then. gRPC's own protection counts calls that have just ended, and with them those
of clients that do nothing wrong, so resets are counted here, in a bucket for each connection.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from quire.shared.logs import logger
from quire.shared.rpc import peer_sockets

log = logger("grpc")

BURST = 500  # resets of a connection at once: several times the calls that it may have under way
PER_SECOND = 100.0  # that are forgotten
MOST_REMEMBERED = 4_096  # connections


@dataclass(slots=True)
class ResetBucket:
    """Resets of one connection that are not forgotten yet."""

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
        """`close` ends the connection of a peer and returns whether there was one."""
        self._close = close
        self._clock = clock
        self._burst = burst
        self._buckets: OrderedDict[str, ResetBucket] = OrderedDict()

    def add(self, peer: str) -> None:
        """Counts a call that its client has reset; `peer`: as gRPC names the other end of its connection."""
        bucket = self._bucket(peer)
        bucket.level += 1
        if bucket.level > self._burst:
            self.end(peer, f"more than {self._burst} calls were reset")

    def end(self, peer: str, reason: str) -> None:
        """Closes a connection."""
        self._buckets.pop(peer, None)
        if self._close(peer):
            log.warning("closed a connection", peer=peer, reason=reason)

    def _bucket(self, peer: str) -> ResetBucket:
        now = self._clock()
        bucket = self._buckets.setdefault(peer, ResetBucket(0.0, now))
        self._buckets.move_to_end(peer)
        bucket.level = max(0.0, bucket.level - PER_SECOND * (now - bucket.seen_s))
        bucket.seen_s = now
        if len(self._buckets) > MOST_REMEMBERED:
            self._buckets.popitem(last=False)
        return bucket
