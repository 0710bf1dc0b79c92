"""A rank that has no scheduler: takes commands from rank 0 and does them in their order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.kv.host_memory import PendingCopy
from quire.services.worker.ranks.grammars import FollowerGrammars
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.ring import RingReader
from quire.services.worker.ranks.wire import Command, CommandKind, RankReply, fingerprint
from quire.services.worker.step.plan import StepPlan
from quire.shared import logs
from quire.shared.errors import QuireError
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.lifecycle import EXIT_FAILED

log = logs.logger("worker.ranks")

HEARTBEAT_INTERVAL_S = 0.1
# Steps on the device that have not been waited for: as many as schedulers have in flight, so that none is late.
MAX_IN_FLIGHT = 2
EXIT_ORPHANED = 4


class FollowerSpeculation(Protocol):
    """See spec_decode/speculation.py."""

    def waits_before(self, plan: StepPlan) -> bool: ...


class FollowerTransfers(Protocol):
    """See replica/block_transfers.py."""

    def move(self, order: pb.Transfer) -> PendingCopy: ...


class FollowerReplica(Protocol):
    """A rank's part of the replica (replica/replica.py). Steps are whatever its launch() gives and record() takes."""

    @property
    def speculation(self) -> FollowerSpeculation: ...

    @property
    def transfers(self) -> FollowerTransfers: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def launch_pending_heads(self) -> None: ...

    def record(self, flight: Any, output: Any) -> None: ...

    def end_epoch(self) -> object: ...

    def execute_order(self, order: pb.DeviceOrder) -> None: ...

    def reset_cache(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankReplica:
    """What a rank is made of."""

    replica: FollowerReplica
    grammars: FollowerGrammars
    synchronous: bool = True  # launches return when they are done
    in_first_stage: bool = True


@dataclass(frozen=True, slots=True)
class RankConnection:
    """Between a rank and rank 0; travels to the rank's process."""

    commands: RingReader
    replies: Connection

    def reply(self, reply: RankReply) -> None:
        self.replies.send_bytes(reply.encode())


def run(connection: RankConnection, placement: RankPlacement, build: Callable[[RankPlacement], RankReplica]) -> None:
    """A rank's process, from its start to its end: when rank 0 says so, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole group; rank 0 decides
    threading.Thread(target=_exit_with_rank_0, args=(connection.replies, placement.rank), daemon=True).start()
    threading.Thread(target=_send_heartbeats, args=(connection.commands,), daemon=True).start()
    try:
        with torch.inference_mode():
            part = build(placement)
            connection.reply(RankReply(0, done=True))
            Follower(connection, part).follow()
        status = 0
    except Exception as error:
        log.exception("the rank failed", rank=placement.rank)
        status = EXIT_FAILED
        with contextlib.suppress(OSError):  # rank 0 is gone
            connection.reply(RankReply(0, done=False, text=_error_text(error)))
    logs.flush()
    os._exit(status)  # torch would wait for CUDA graphs with collectives in them


def _exit_with_rank_0(replies: Connection, rank: int) -> None:
    """Rank 0 never writes: what comes is its end. Then a collective that waits for it would last for minutes."""
    with contextlib.suppress(EOFError, OSError):
        replies.poll(None)
    log.warning("rank 0 is gone", rank=rank)
    logs.flush()
    os._exit(EXIT_ORPHANED)


def _send_heartbeats(commands: RingReader) -> None:
    while True:
        commands.send_heartbeat()
        threading.Event().wait(HEARTBEAT_INTERVAL_S)


class Follower:
    """Launches what rank 0 launches. A command that fails is answered with its error, and rank 0 decides."""

    def __init__(self, connection: RankConnection, part: RankReplica) -> None:
        self._connection, self._replica, self._grammars = connection, part.replica, part.grammars
        self._in_first_stage = part.in_first_stage
        self._max_in_flight = 0 if part.synchronous else MAX_IN_FLIGHT
        self._flights: deque[Any] = deque()  # as the replica launched them
        self._moves: dict[int, PendingCopy] = {}  # of blocks, by transfer, that rank 0 has not done yet

    def follow(self) -> None:
        """Until it is told to stop."""
        while (command := Command.decode(self._connection.commands.read())).kind != CommandKind.STOP:
            try:
                self._process(command)
            except Exception as error:
                self._connection.reply(RankReply(command.number, done=False, text=_error_text(error)))

    def _process(self, command: Command) -> None:
        match command.kind:
            case CommandKind.PLAN:
                self._launch(command)
            case CommandKind.SETTLE:
                if self._in_first_stage:
                    self._replica.launch_pending_heads()
                    self._record(down_to=self._max_in_flight)
            case CommandKind.END_EPOCH:
                self._record(down_to=0)
                self._end_moves()
                self._grammars.release_all()
                self._replica.end_epoch()
                self._connection.reply(RankReply(command.number, done=True))
            case CommandKind.ORDER:
                self._record(down_to=0)
                self._connection.reply(RankReply(command.number, done=True, text=self._execute_order(command.body)))
            case CommandKind.MOVE_BLOCKS:
                order = pb.Transfer.FromString(command.body)
                self._moves[order.transfer_id] = self._replica.transfers.move(order)
            case CommandKind.BLOCKS_MOVED:
                pending = self._moves.pop(int.from_bytes(command.body, "little"), None)
                if pending is not None:  # else it was of an epoch that has ended
                    pending.wait()
            case CommandKind.RESET_CACHE:
                self._replica.reset_cache()
            case CommandKind.PREPARE_GRAMMAR:
                self._grammars.prepare(pb.PrepareGrammar.FromString(command.body))
            case CommandKind.RELEASE_GRAMMAR:
                self._grammars.release(command.body)

    def _end_moves(self) -> None:
        for pending in self._moves.values():
            pending.wait()
        self._moves.clear()

    def _execute_order(self, order: bytes) -> bytes:
        """Returns why it cannot be."""
        try:
            self._replica.execute_order(pb.DeviceOrder.FromString(order))
        except QuireError as error:
            return error.message.encode() or b"refused"
        return b""

    def _launch(self, command: Command) -> None:
        """Answered before the device is done with it: what ranks compute together, none ends without the others."""
        plan = decode_plan(pb.StepPlan.FromString(command.body))
        self._grammars.await_grammars_of(plan)
        if self._replica.speculation.waits_before(plan):
            self._record(down_to=0)
        flight = self._replica.launch(plan)
        self._flights.append(flight)
        self._connection.reply(RankReply(command.number, done=True, text=fingerprint(flight.inputs)))
        self._record(down_to=self._max_in_flight)

    def _record(self, down_to: int) -> None:
        """Steps that are not settled are left."""
        while len(self._flights) > down_to and self._flights[0].launch.heads_launched:
            flight = self._flights.popleft()
            self._replica.record(flight, flight.launch.wait())


def _error_text(error: Exception) -> bytes:
    return f"{type(error).__name__}: {error}".encode()
