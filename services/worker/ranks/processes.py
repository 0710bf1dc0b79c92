"""Ranks as processes of this host: commands through shared memory, replies through one pipe each."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess

from quire.services.worker.ranks import follower
from quire.services.worker.ranks.follower import RankConnection, RankReplica
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.peer_rank import PeerRank
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.ring import Ring
from quire.services.worker.ranks.wire import RankReply

START_CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")  # fork does not copy threads


class RankProcess(PeerRank):
    """A rank on this host, in its own process."""

    max_silent_checks = 4

    def __init__(
        self, number: int, process: BaseProcess, replies: Connection, read_heartbeat: Callable[[], int]
    ) -> None:
        super().__init__(number)
        self.process, self.replies, self.read_heartbeat = process, replies, read_heartbeat

    def terminate(self, deadline: float) -> None:
        """Waits for the process until `deadline` (time.monotonic()), then kills it."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} {what}")

    def _receive(self, timeout_s: float) -> RankReply | None:
        """Returns the next reply from the pipe, or None after the timeout. Raises RankFailure if the process has
        ended."""
        try:
            return RankReply.parse(self.replies.recv_bytes()) if self.replies.poll(timeout_s) else None
        except (EOFError, OSError):
            raise self.failure("has ended") from None

    def _check_link(self) -> None:
        """Raises RankFailure if the process has ended, with its own error if it failed while being built."""
        if not self.process.is_alive():
            if not self.ready and self.replies.poll():
                self.await_reply(0, 0.0)  # raises the rank's error
            raise self.failure(f"has ended: its process exited with {self.process.exitcode}")

    def _heartbeat(self) -> int:
        return self.read_heartbeat()


class RankProcesses:
    """Processes of this host's ranks with the ring that commands them, one per placement, started at construction."""

    def __init__(self, placements: Sequence[RankPlacement], build: Callable[[RankPlacement], RankReplica]) -> None:
        """`build`: builds a rank's part in its process and must be picklable."""
        self.ranks: list[RankProcess] = []
        self._ring: Ring | None = None
        if not placements:
            return
        self._ring = ring = Ring(len(placements))
        for place, placement in enumerate(placements):
            ours, theirs = START_CONTEXT.Pipe()
            arguments = (RankConnection(ring.reader(place), theirs), placement, build)
            process = START_CONTEXT.Process(
                target=follower.run, args=arguments, name=f"rank {placement.rank}", daemon=True
            )
            process.start()
            theirs.close()  # the pipe then closes with the process
            self.ranks.append(RankProcess(placement.rank, process, ours, functools.partial(ring.heartbeat, place)))

    def write(self, command: bytes, timeout_s: float) -> None:
        """Writes a command for all ranks, from one thread at a time. Raises RankFailure if one reads nothing for
        `timeout_s`."""
        slowest = self._ring.write(command, timeout_s) if self._ring is not None else None
        if slowest is not None:
            raise RankFailure(f"rank {self.ranks[slowest].number} has read nothing for {timeout_s:.0f} s")

    def close(self) -> None:
        """Frees the shared memory and pipes of ranks that have ended."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        for rank in self.ranks:
            rank.replies.close()
        self.ranks = []
