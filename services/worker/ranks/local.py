"""Ranks of one host: a process each, that rank 0 starts. Commands go through memory that all share, answers through a
pipe from each."""

from __future__ import annotations

import multiprocessing
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.worker.ranks import follower
from services.worker.ranks.follower import Lines, RankReplica
from services.worker.ranks.group import RankFailure
from services.worker.ranks.ring import Ring
from services.worker.ranks.seat import Seat
from services.worker.ranks.wire import ANSWERED, Command, Kind, Reply, fingerprint
from services.worker.step.step_inputs import StepInputs
from shared.pb.worker.v1 import worker_pb2 as pb

LOOPBACK = "127.0.0.1"
START_PATIENCE_S = 600.0  # a rank loads its weights
PATIENCE_S = 120.0  # longest that a rank may lag behind rank 0: the time after which a step counts as hanging
ORDER_PATIENCE_S = 600.0  # it reads weights
# Looks at a rank, of check(), between two signs of life. Looks and not a clock: where the whole group has been stopped
# and goes on, nobody is taken for dead.
MOST_SILENT_LOOKS = 4


@dataclass
class _Rank:
    """Another rank, as rank 0 sees it."""

    number: int
    process: BaseProcess
    replies: Connection
    stopping: bool = field(default=False)
    ready: bool = field(default=False)
    _pulse: int = 0
    _silent_looks: int = 0

    def reply_to(self, number: int, patience_s: float) -> Reply:
        """Answers to commands that rank 0 gave up are passed over."""
        deadline = time.monotonic() + patience_s
        while True:
            try:
                if not self.replies.poll(max(0.0, deadline - time.monotonic())):
                    raise self._failure(f"has not answered within {patience_s:.0f} s")
                reply = Reply.decode(self.replies.recv_bytes())
            except (EOFError, OSError):
                raise self._failure("is gone") from None
            if not reply.done:
                raise self._failure(f"failed: {reply.text.decode(errors='replace')}")
            if reply.number == number:
                return reply

    def check(self, pulse: int) -> None:
        if self.stopping:
            return
        if not self.process.is_alive():
            if not self.ready and self.replies.poll():
                self.reply_to(0, 0.0)  # says why
            raise self._failure(f"is gone: its process ended with {self.process.exitcode}")
        self._silent_looks = self._silent_looks + 1 if self.ready and pulse == self._pulse else 0
        self._pulse = pulse
        if self._silent_looks > MOST_SILENT_LOOKS:
            raise self._failure("gives no sign of life")

    def end(self, deadline: float) -> None:
        """By force, if it has not ended by then."""
        self.process.join(max(0.0, deadline - time.monotonic()))
        if self.process.is_alive():
            self.process.kill()
            self.process.join()

    def _failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} {what}")


def _meeting_place(size: int) -> tuple[TCPStore, int]:
    """On the loopback alone: left to itself it would listen on every address of the host. And its port."""
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(LOOPBACK, port, size, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return store, port


class LocalRanks:
    """Ranks 1 to size - 1."""

    def __init__(self, size: int, build: Callable[[Seat], RankReplica], stages: int = 1) -> None:
        """`build` makes the part of a rank, in its process: it must be picklable. The processes begin at once.
        `stages`: that they are shared out among."""
        self.size = size
        self._store, port = _meeting_place(size)
        self.seats = [Seat(rank, size, LOOPBACK, port, stages) for rank in range(size)]
        self._number = 0  # of the last command
        self._ring = Ring(size - 1)
        self._writing = threading.Lock()  # commands come from the device's thread, the last one from any
        context = multiprocessing.get_context("spawn")
        self._ranks: list[_Rank] = []
        for rank in range(1, size):
            ours, theirs = context.Pipe()
            arguments = (Lines(self._ring.reader(rank - 1), theirs), self.seats[rank], build)
            process = context.Process(target=follower.run, args=arguments, name=f"rank {rank}", daemon=True)
            process.start()
            theirs.close()  # so that the end of the process is the end of the link
            self._ranks.append(_Rank(rank, process, ours))

    @property
    def pids(self) -> list[int]:
        """Of the ranks' processes."""
        return [rank.process.pid or 0 for rank in self._ranks]

    def start(self) -> None:
        for rank in self._ranks:
            rank.reply_to(0, START_PATIENCE_S)
            rank.ready = True

    def broadcast(self, plan: pb.StepPlan) -> int:
        return self._send(Kind.PLAN, plan.SerializeToString())

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        own = fingerprint(inputs)
        for rank in self._ranks:
            if rank.reply_to(ticket, PATIENCE_S).text != own:
                raise RankFailure(f"rank {rank.number} derived another step than rank 0")

    def prepare_grammar(self, order: pb.PrepareGrammar) -> None:
        self._send(Kind.PREPARE_GRAMMAR, order.SerializeToString())

    def release_grammar(self, grammar_id: bytes) -> None:
        self._send(Kind.RELEASE_GRAMMAR, grammar_id)

    def settle_step(self) -> None:
        if self.seats[0].stages > 1 and self.seats[0].width > 1:
            self._send(Kind.SETTLE)

    def rest(self) -> None:
        ticket = self._send(Kind.REST)
        for rank in self._ranks:
            rank.reply_to(ticket, PATIENCE_S)

    def forget_cache(self) -> None:
        self._send(Kind.FORGET_CACHE)

    def order(self, order: pb.DeviceOrder) -> int:
        return self._send(Kind.ORDER, order.SerializeToString())

    def settle(self, ticket: int) -> list[str]:
        replies = [rank.reply_to(ticket, ORDER_PATIENCE_S) for rank in self._ranks]
        pairs = zip(self._ranks, replies, strict=True)
        return [f"rank {rank.number}: {reply.text.decode(errors='replace')}" for rank, reply in pairs if reply.text]

    def check(self) -> None:
        for rank in self._ranks:
            rank.check(self._ring.pulse(rank.number - 1))

    def stop(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        stopping = [rank.stopping for rank in self._ranks]
        for rank in self._ranks:
            rank.stopping = True
        if not all(stopping) and timeout_s > 0 and self._writing.acquire(timeout=timeout_s):
            try:
                self._ring.write(Command(0, Kind.STOP).encode(), patience_s=timeout_s)
            finally:
                self._writing.release()
        for rank in self._ranks:
            rank.end(deadline)

    def _send(self, kind: Kind, body: bytes = b"") -> int:
        """Returns the number that answers have, if there will be some."""
        with self._writing:
            self._number += kind in ANSWERED
            data = Command(self._number if kind in ANSWERED else 0, kind, body).encode()
            behind = self._ring.write(data, PATIENCE_S)
        if behind is not None:
            raise RankFailure(f"rank {behind + 1} has read nothing for {PATIENCE_S:.0f} s")
        return self._number
