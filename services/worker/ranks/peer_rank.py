"""Another rank, as seen by rank 0: its replies in order, and its heartbeats."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import ClassVar

from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.wire import RankReply


class PeerRank(ABC):
    """Base of local and remote ranks, which define how replies and heartbeats arrive."""

    # Checks between two heartbeats. Counting checks instead of time tolerates a pause of the whole group (SIGSTOP).
    max_silent_checks: ClassVar[int]
    last_heartbeat = 0  # value at the last check

    def __init__(self, number: int) -> None:
        self.number = number
        self.ready = False
        self.stopping = False
        self._num_silent_checks = 0

    def await_reply(self, number: int, timeout_s: float) -> RankReply:
        """Returns the reply to a command, skipping replies to abandoned commands. Raises RankFailure if the rank
        reports an error or does not reply within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while True:
            reply = self._receive(max(0.0, deadline - time.monotonic()))
            if reply is None:
                raise self.failure(f"has not replied within {timeout_s:.0f} s")
            if not reply.done:
                raise self.failure(f"failed: {reply.text.decode(errors='replace')}")
            if reply.number == number:
                return reply

    def check(self) -> None:
        """Raises RankFailure if the rank has ended or sent no heartbeat for several checks."""
        if self.stopping:
            return
        self._check_link()
        heartbeat = self._heartbeat()
        self._num_silent_checks = self._num_silent_checks + 1 if self.ready and heartbeat == self.last_heartbeat else 0
        self.last_heartbeat = heartbeat
        if self._num_silent_checks > self.max_silent_checks:
            raise self.failure("has sent no heartbeat")

    @abstractmethod
    def terminate(self, deadline: float) -> None:
        """Ends the rank by force at `deadline`."""

    @abstractmethod
    def failure(self, what: str) -> RankFailure: ...

    @abstractmethod
    def _receive(self, timeout_s: float) -> RankReply | None:
        """Returns the next reply, or None after the timeout. Raises RankFailure if no reply can arrive."""

    @abstractmethod
    def _check_link(self) -> None:
        """Raises RankFailure if the rank has ended."""

    @abstractmethod
    def _heartbeat(self) -> int:
        """Returns a number that changes while the rank is alive."""
