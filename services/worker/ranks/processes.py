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
from quire.services.worker.ranks.follower import Lines, RankReplica
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.peer_rank import PeerRank
from quire.services.worker.ranks.ring import Ring
from quire.services.worker.ranks.seat import Seat
from quire.services.worker.ranks.wire import RankReply

BEGINNING: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")  # threads survive no fork


class RankProcess(PeerRank):
    """A rank of this host."""

    max_silent_checks = 4

    def __init__(self, number: int, process: BaseProcess, replies: Connection, read_pulse: Callable[[], int]) -> None:
        super().__init__(number)
        self.process, self.replies, self.read_pulse = process, replies, read_pulse

    def end(self, deadline: float) -> None:
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
                self.reply_to(0, 0.0)  # says why
            raise self.failure(f"is gone: its process ended with {self.process.exitcode}")

    def _pulse(self) -> int:
        return self.read_pulse()


class RankProcesses:
    """A process for each seat; they begin at once."""

    def __init__(self, seats: Sequence[Seat], build: Callable[[Seat], RankReplica]) -> None:
        """`build` makes the part of a rank, in its process: it must be picklable."""
        self.ranks: list[RankProcess] = []
        self._ring: Ring | None = None
        if not seats:
            return
        self._ring = ring = Ring(len(seats))
        for place, seat in enumerate(seats):
            ours, theirs = BEGINNING.Pipe()
            arguments = (Lines(ring.reader(place), theirs), seat, build)
            process = BEGINNING.Process(target=follower.run, args=arguments, name=f"rank {seat.rank}", daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the link
            self.ranks.append(RankProcess(seat.rank, process, ours, functools.partial(ring.pulse, place)))

    def write(self, command: bytes, patience_s: float) -> None:
        """To all of them; one thread at a time. Raises RankFailure if one has read nothing for so long."""
        behind = self._ring.write(command, patience_s) if self._ring is not None else None
        if behind is not None:
            raise RankFailure(f"rank {self.ranks[behind].number} has read nothing for {patience_s:.0f} s")

    def close(self) -> None:
        """Of ranks that have ended, where nobody asks for them any more."""
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        for rank in self.ranks:
            rank.replies.close()
        self.ranks = []
