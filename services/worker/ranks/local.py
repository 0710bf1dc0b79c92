"""Ranks of one host: a process each, that rank 0 starts and reaches through a pipe."""

from __future__ import annotations

import contextlib
import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from services.worker.ranks import follower
from services.worker.ranks.group import RankFailure
from services.worker.ranks.wire import Command, Kind, Reply, fingerprint
from services.worker.replica import Replica
from services.worker.step.step_inputs import StepInputs
from shared.pb.worker.v1 import worker_pb2 as pb

START_PATIENCE_S = 600.0  # a rank loads its weights
PATIENCE_S = 120.0  # longest that a rank may lag behind rank 0: the time after which a step counts as hanging


@dataclass
class _Rank:
    """Another rank, as rank 0 sees it."""

    number: int
    process: BaseProcess
    link: Connection
    stopping: bool = field(default=False)

    def send(self, data: bytes) -> None:
        try:
            self.link.send_bytes(data)
        except OSError as error:
            raise self._failure(f"is gone: {error}") from None

    def reply_to(self, number: int, patience_s: float) -> Reply:
        """Answers to commands that rank 0 gave up are passed over."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if not self.link.poll(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"has not answered within {patience_s:.0f} s")
                reply = Reply.decode(self.link.recv_bytes())
            except (EOFError, OSError):
                raise self._failure("is gone") from None
            if reply.number == number:
                break
        if not reply.done:
            raise self._failure(f"failed: {reply.text.decode(errors='replace')}")
        return reply

    def check(self) -> None:
        if not self.process.is_alive() and not self.stopping:
            raise self._failure(f"is gone: its process ended with {self.process.exitcode}")

    def stop(self, deadline: float) -> None:
        if not self.stopping:
            self.stopping = True
            with contextlib.suppress(OSError):  # it is gone
                self.link.send_bytes(Command(0, Kind.STOP).encode())
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} {what}")


class LocalRanks:
    """Ranks 1 to size - 1."""

    def __init__(self, size: int, build: Callable[[int], Replica]) -> None:
        """`build` makes the part of a rank, in its process: it must be picklable. The processes begin at once."""
        self.size = size
        self._number = 0  # of the last command
        context = multiprocessing.get_context("spawn")
        self._ranks: list[_Rank] = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            process = context.Process(target=follower.run, args=(theirs, rank, build), name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the link
            self._ranks.append(_Rank(rank, process, ours))

    def start(self) -> None:
        for rank in self._ranks:
            rank.reply_to(0, START_PATIENCE_S)

    def broadcast(self, plan: pb.StepPlan) -> int:
        return self._send(Kind.PLAN, plan.SerializeToString())

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        own = fingerprint(inputs)
        for rank in self._ranks:
            if rank.reply_to(ticket, PATIENCE_S).text != own:
                raise RankFailure(f"rank {rank.number} derived another step than rank 0")

    def rest(self) -> None:
        self._await(self._send(Kind.REST))

    def forget_cache(self) -> None:
        self._send(Kind.FORGET_CACHE)  # its answer is passed over: steps may be waited for at the same time

    def check(self) -> None:
        for rank in self._ranks:
            rank.check()

    def stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for rank in self._ranks:
            rank.stop(deadline)

    def _send(self, kind: Kind, plan: bytes = b"") -> int:
        self._number += 1
        data = Command(self._number, kind, plan).encode()
        for rank in self._ranks:
            rank.send(data)
        return self._number

    def _await(self, ticket: int) -> None:
        for rank in self._ranks:
            rank.reply_to(ticket, PATIENCE_S)
