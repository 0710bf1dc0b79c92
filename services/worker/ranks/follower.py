"""A rank other than rank 0: executes rank 0's commands in order."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Protocol

import torch

from quire.services.worker.codec.media_codec import decode_fetched
from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.kv.host_memory import PendingCopy
from quire.services.worker.ranks.grammars import FollowerGrammars
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.ring import RingReader
from quire.services.worker.ranks.wire import Command, CommandKind, RankReply, fingerprint
from quire.services.worker.step.fetched_item import Fetched
from quire.services.worker.step.plan import StepPlan
from quire.shared import logs
from quire.shared.errors import QuireError
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.lifecycle import EXIT_FAILED

log = logs.logger("worker.ranks")

HEARTBEAT_INTERVAL_S = 0.1
# Steps launched without waiting for their results; equals the scheduler's steps in flight, so that none is delayed.
MAX_IN_FLIGHT = 2
EXIT_ORPHANED = 4


class FollowerSpeculation(Protocol):
    """Interface of spec_decode/speculation.py used here."""

    def waits_before(self, plan: StepPlan) -> bool: ...


class FollowerTransfers(Protocol):
    """Interface of replica/block_transfers.py used here."""

    def move(self, order: pb.Transfer) -> PendingCopy: ...


class FollowerMedia(Protocol):
    """Interface of replica/media_encoding.py used here."""

    def encode(self, items: Sequence[Fetched]) -> object: ...

    def release(self, identifier: bytes) -> None: ...


class FollowerReplica(Protocol):
    """A rank's part of the replica (replica/replica.py). record() takes what launch() returned."""

    @property
    def speculation(self) -> FollowerSpeculation: ...

    @property
    def transfers(self) -> FollowerTransfers: ...

    @property
    def media(self) -> FollowerMedia: ...

    def launch(self, plan: StepPlan) -> Any: ...

    def launch_pending_heads(self) -> None: ...

    def record(self, flight: Any, output: Any) -> None: ...

    def end_epoch(self) -> object: ...

    def execute_order(self, order: pb.DeviceOrder) -> None: ...

    def reset_cache(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RankReplica:
    """A rank's replica with its grammars."""

    replica: FollowerReplica
    grammars: FollowerGrammars
    synchronous: bool = True  # launches return when the step has finished
    in_first_stage: bool = True


@dataclass(frozen=True, slots=True)
class RankConnection:
    """Commands from and replies to rank 0; passed to the rank's process."""

    commands: RingReader
    replies: Connection

    def reply(self, reply: RankReply) -> None:
        self.replies.send_bytes(reply.to_bytes())


def run(connection: RankConnection, placement: RankPlacement, build: Callable[[RankPlacement], RankReplica]) -> None:
    """Main function of a rank's process: builds its part, replies 0 (ready or failed), then executes commands until
    rank 0 sends STOP or ends. Ends the process without cleanup."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; rank 0 decides
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
        with contextlib.suppress(OSError):  # rank 0 has ended
            connection.reply(RankReply(0, done=False, text=_error_text(error)))
    logs.flush()
    os._exit(status)  # torch would wait for CUDA graphs that contain collectives


def _exit_with_rank_0(replies: Connection, rank: int) -> None:
    """Exits when rank 0 ends, as a collective would wait for it for minutes. Rank 0 never writes, so any event is its
    end."""
    with contextlib.suppress(EOFError, OSError):
        replies.poll(None)
    log.warning("rank 0 has ended", rank=rank)
    logs.flush()
    os._exit(EXIT_ORPHANED)


def _send_heartbeats(commands: RingReader) -> None:
    """Increments this rank's heartbeat counter every 0.1 s. Never returns."""
    while True:
        commands.send_heartbeat()
        threading.Event().wait(HEARTBEAT_INTERVAL_S)


class Follower:
    """Launches the steps that rank 0 launches. A failed command is answered with its error, and rank 0 decides."""

    def __init__(self, connection: RankConnection, part: RankReplica) -> None:
        self._connection, self._replica, self._grammars = connection, part.replica, part.grammars
        self._in_first_stage = part.in_first_stage
        self._max_in_flight = 0 if part.synchronous else MAX_IN_FLIGHT
        self._flights: deque[Any] = deque()  # as the replica launched them
        self._moves: dict[int, PendingCopy] = {}  # by transfer id, until rank 0 has finished its part

    def follow(self) -> None:
        """Executes commands until STOP; a command that raises is answered with its error, and the next one follows."""
        while (command := Command.parse(self._connection.commands.read())).kind != CommandKind.STOP:
            try:
                self._process(command)
            except Exception as error:
                self._connection.reply(RankReply(command.number, done=False, text=_error_text(error)))

    def _process(self, command: Command) -> None:
        """Executes one command. Only PLAN, END_EPOCH and ORDER are answered; errors are raised to follow()."""
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
                if pending is not None:  # None: of an ended epoch
                    pending.wait()
            case CommandKind.RESET_CACHE:
                self._replica.reset_cache()
            case _:
                self._prepare(command)

    def _prepare(self, command: Command) -> None:
        """Prepares or releases what sequences need besides plans: a grammar, or media items."""
        match command.kind:
            case CommandKind.PREPARE_GRAMMAR:
                self._grammars.prepare(pb.PrepareGrammar.FromString(command.body))
            case CommandKind.RELEASE_GRAMMAR:
                self._grammars.release(command.body)
            case CommandKind.ENCODE_MEDIA:
                self._replica.media.encode(decode_fetched(command.body))
            case CommandKind.RELEASE_MEDIA:
                self._replica.media.release(command.body)

    def _end_moves(self) -> None:
        """Waits for all started block transfers and forgets them."""
        for pending in self._moves.values():
            pending.wait()
        self._moves.clear()

    def _execute_order(self, order: bytes) -> bytes:
        """Executes a device order; returns the refusal, b"" if it succeeded."""
        try:
            self._replica.execute_order(pb.DeviceOrder.FromString(order))
        except QuireError as error:
            return error.message.encode() or b"refused"
        return b""

    def _launch(self, command: Command) -> None:
        """Launches a step and replies with its fingerprint before the device has finished: no rank completes a joint
        computation alone. Waits for grammars of the plan and, where required, for earlier steps."""
        plan = decode_plan(pb.StepPlan.FromString(command.body))
        self._grammars.await_grammars_of(plan)
        if self._replica.speculation.waits_before(plan):
            self._record(down_to=0)
        flight = self._replica.launch(plan)
        self._flights.append(flight)
        self._connection.reply(RankReply(command.number, done=True, text=fingerprint(flight.inputs)))
        self._record(down_to=self._max_in_flight)

    def _record(self, down_to: int) -> None:
        """Records finished steps until `down_to` are left, except those that wait for other stages."""
        while len(self._flights) > down_to and self._flights[0].launch.heads_launched:
            flight = self._flights.popleft()
            self._replica.record(flight, flight.launch.wait())


def _error_text(error: Exception) -> bytes:
    return f"{type(error).__name__}: {error}".encode()
