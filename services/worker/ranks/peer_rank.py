"""Another rank, as rank 0 sees it: answers to commands in their order, and signs of life."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar

from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.wire import RankReply


class PeerRank(ABC):
    """A kind of rank says how its answers arrive, and how it is seen to live."""

    # Checks between two signs of life, and not a time: where the whole group has been stopped and continues, no rank is
    # taken for dead.
    max_silent_checks: ClassVar[int]
    last_heartbeat = 0  # of the last check

    def __init__(self, number: int) -> None:
        self.number = number
        self.ready = False
        self.stopping = False
        self._num_silent_checks = 0

    def await_reply(self, number: int, timeout_s: float) -> RankReply:
        """Passes over answers to commands that rank 0 gave up. Raises RankFailure."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise self.failure(f"has not answered within {timeout_s:.0f} s")
            if not reply.done:
                raise self.failure(f"failed: {reply.text.decode(errors='replace')}")
            if reply.number == number:
                return reply

    def check(self) -> None:
        """Raises RankFailure if it is gone, or has given no sign of life for some checks."""
        if self.stopping:
            return
        self._check_link()
        heartbeat = self._heartbeat()
        self._num_silent_checks = self._num_silent_checks + 1 if self.ready and heartbeat == self.last_heartbeat else 0
        self.last_heartbeat = heartbeat
        if self._num_silent_checks > self.max_silent_checks:
            raise self.failure("gives no sign of life")

    @abstractmethod
    def terminate(self, deadline: float) -> None:
        """Ends it by force, if it has not ended by then."""

    @abstractmethod
    def failure(self, what: str) -> RankFailure: ...

    @abstractmethod
    def _receive(self, timeout_s: float) -> RankReply | None:
        """The next answer; None: none came in time. Raises RankFailure if none can come."""

    @abstractmethod
    def _check_link(self) -> None:
        """Raises RankFailure if it is gone."""

    @abstractmethod
    def _heartbeat(self) -> int:
        """A number that changes while it lives."""
