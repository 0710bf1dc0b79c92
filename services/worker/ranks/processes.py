"""Ranks that are processes of this host: commands through memory that all share, answers through a pipe from each."""

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

START_CONTEXT: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")  # threads survive no fork


class RankProcess(PeerRank):
    """A rank of this host."""

    max_silent_checks = 4

    def __init__(
        self, number: int, process: BaseProcess, replies: Connection, read_heartbeat: Callable[[], int]
    ) -> None:
        super().__init__(number)
        self.process, self.replies, self.read_heartbeat = process, replies, read_heartbeat

    def terminate(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} {what}")

    def _receive(self, timeout_s: float) -> RankReply | None:
        try:
            return RankReply.decode(self.replies.recv_bytes()) if self.replies.poll(timeout_s) else None
        except (EOFError, OSError):
            raise self.failure("is gone") from None

    def _check_link(self) -> None:
        if not self.process.is_alive():
            if not self.ready and self.replies.poll():
                self.await_reply(0, 0.0)  # says why
            raise self.failure(f"is gone: its process ended with {self.process.exitcode}")

    def _heartbeat(self) -> int:
        return self.read_heartbeat()


class RankProcesses:
    """A process for each placement; they begin at once."""

    def __init__(self, placements: Sequence[RankPlacement], build: Callable[[RankPlacement], RankReplica]) -> None:
        """`build` makes the part of a rank, in its process: it must be picklable."""
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
            theirs.close()  # so that the end of the process is the end of the link
            self.ranks.append(RankProcess(placement.rank, process, ours, functools.partial(ring.heartbeat, place)))

    def write(self, command: bytes, timeout_s: float) -> None:
        """To all of them; one thread at a time. Raises RankFailure if one has read nothing for so long."""
        behind = self._ring.write(command, timeout_s) if self._ring is not None else None
        if behind is not None:
            raise RankFailure(f"rank {self.ranks[behind].number} has read nothing for {timeout_s:.0f} s")

    def close(self) -> None:
        """Of ranks that have ended, where nobody asks for them any more."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        for rank in self.ranks:
            rank.replies.close()
        self.ranks = []
