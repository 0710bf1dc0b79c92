"""Ranks that are processes of this host: commands through memory that all share, answers through a pipe from each."""

from __future__ import annotations

import functools
import multiprocessing
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from typing import Protocol

from quire.services.worker.ranks import follower
from quire.services.worker.ranks.follower import Lines, RankReplica
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.ring import Ring
from quire.services.worker.ranks.seat import Seat
from quire.services.worker.ranks.wire import RankReply

# Looks at a rank, of check(), between two signs of life. Looks and not a clock: where the whole group has been stopped
# and goes on, nobody is taken for dead.
MOST_SILENT_LOOKS = 4

BEGINNING: SpawnContext | ForkServerContext = multiprocessing.get_context("spawn")  # threads survive no fork


class Rank(Protocol):
    """Another rank, as rank 0 sees it."""

    number: int
    ready: bool
    stopping: bool

    def reply_to(self, number: int, patience_s: float) -> RankReply:
        """Answers to commands that rank 0 gave up are passed over. Raises RankFailure."""

    def check(self) -> None:
        """Raises RankFailure if it is gone, or has given no sign of life for some looks."""

    def end(self, deadline: float) -> None:
        """By force, if it has not ended by then."""


@dataclass
class RankProcess:
    """A rank of this host."""

    number: int
    process: BaseProcess
    replies: Connection
    read_pulse: Callable[[], int]
    stopping: bool = field(default=False)
    ready: bool = field(default=False)
    _pulse: int = 0
    _silent_looks: int = 0

    def reply_to(self, number: int, patience_s: float) -> RankReply:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if not self.replies.poll(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"has not answered within {patience_s:.0f} s")
                reply = RankReply.decode(self.replies.recv_bytes())
            except (EOFError, OSError):
                raise self._failure("is gone") from None
            if not reply.done:
                raise self._failure(f"failed: {reply.text.decode(errors='replace')}")
            if reply.number == number:
                return reply

    def check(self) -> None:
        if self.stopping:
            return
        if not self.process.is_alive():
            if not self.ready and self.replies.poll():
                self.reply_to(0, 0.0)  # says why
            raise self._failure(f"is gone: its process ended with {self.process.exitcode}")
        pulse = self.read_pulse()
        self._silent_looks = self._silent_looks + 1 if self.ready and pulse == self._pulse else 0
        self._pulse = pulse
        if self._silent_looks > MOST_SILENT_LOOKS:
            raise self._failure("gives no sign of life")

    def end(self, deadline: float) -> None:
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} {what}")


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
