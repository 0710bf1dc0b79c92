"""A host without rank 0: dials rank 0's host, runs ranks for it, and ends with it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait

from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.hosts import wire
from quire.services.worker.ranks.hosts.channel import Channel, HostHandshake
from quire.services.worker.ranks.hosts.interfaces import interface_of
from quire.services.worker.ranks.hosts.wire import Welcome
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.processes import RankProcesses
from quire.services.worker.ranks.wire import Command, CommandKind
from quire.shared.errors import QuireError, Unavailable
from quire.shared.logs import logger

log = logger("worker.node")

DIAL_PAUSE_S = 0.5
DIAL_TIMEOUT_S = 5.0
MAX_SILENT_CHECKS = 40  # without a frame from rank 0, which sends two per second
WRITE_TIMEOUT_S = 120.0
END_TIMEOUT_S = 10.0

Build = Callable[[Welcome], Callable[[RankPlacement], RankReplica]]


def dial(
    host: str, port: int, handshake: HostHandshake, node: int, stopping: threading.Event
) -> tuple[Channel, Welcome] | None:
    """Dials every DIAL_PAUSE_S until rank 0 accepts this host; returns the channel and the welcome, or None when
    `stopping` is set. Logs new reasons of rejection. Raises Unauthenticated."""
    last_reason = ""
    while not stopping.is_set():
        channel = None
        try:
            channel = Channel(socket.create_connection((host, port), timeout=DIAL_TIMEOUT_S))
            handshake.connect(channel, node)
            return channel, Welcome.parse(channel.receive())
        except (OSError, Unavailable) as error:  # not started yet, or about to end
            if channel is not None:
                channel.close()
            if last_reason != str(error):
                log.info("node 0 does not accept this host yet", at=f"{host}:{port}", reason=str(error))
            last_reason = str(error)
            stopping.wait(DIAL_PAUSE_S)
    return None


class NodeRanks:
    """Ranks of this host during one run of the replica: relays commands, replies and heartbeats between them and rank
    0."""

    def __init__(self, channel: Channel, welcome: Welcome, node: int, build: Build) -> None:
        """Starts the ranks' processes. Raises QuireError if both hosts' settings do not match."""
        self._channel = channel
        interface, first = interface_of(channel.own_address), node * welcome.per_host
        placements = [
            RankPlacement(
                rank,
                welcome.size,
                welcome.host,
                welcome.port,
                welcome.stages,
                welcome.per_host,
                interface,
                welcome.contexts,
            )
            for rank in range(first, first + welcome.per_host)
        ]
        self.processes = RankProcesses(placements, build(welcome))
        self._over = threading.Event()
        self._num_silent_checks = 0

    def run(self) -> str:
        """Relays until rank 0 stops or ends, or a rank of this host ends; returns the reason."""
        others = [threading.Thread(target=work, daemon=True) for work in (self._relay_answers, self._watch)]
        for other in others:
            other.start()
        timeout_s, reason = END_TIMEOUT_S, "rank 0 has stopped"
        try:
            self._channel.set_timeout(None)
            self._relay_commands()
        except (OSError, QuireError) as error:
            timeout_s, reason = 0.0, str(error)
        finally:
            self.end(timeout_s)
            for other in others:
                other.join(END_TIMEOUT_S)
            if not any(other.is_alive() for other in others):  # otherwise they may still use the processes
                self.processes.close()
        return reason

    def end(self, timeout_s: float) -> None:
        """Ends this host's ranks, by force after `timeout_s`, and closes the link."""
        self._over.set()
        deadline = time.monotonic() + timeout_s
        for rank in self.processes.ranks:
            rank.terminate(deadline)
        self._channel.close()

    def _relay_commands(self) -> None:
        """Passes commands from rank 0 to the ranks of this host until STOP. Raises OSError or QuireError if the link
        ends, RankFailure if a rank does not read."""
        while True:
            frame = self._channel.receive()
            self._num_silent_checks = 0
            if not frame:
                continue
            is_last = Command.parse(frame).kind == CommandKind.STOP
            for rank in self.processes.ranks:
                rank.stopping = is_last
            self.processes.write(frame, WRITE_TIMEOUT_S)
            if is_last:
                return

    def _relay_answers(self) -> None:
        """Thread body: passes the ranks' replies to rank 0 until all their pipes have ended or this run is over."""
        numbers: dict[object, int] = {rank.replies: rank.number for rank in self.processes.ranks}
        links: list[Connection] = [rank.replies for rank in self.processes.ranks]
        while links and not self._over.is_set():
            for link in wait(links, timeout=wire.HEARTBEAT_INTERVAL_S):
                assert isinstance(link, Connection)
                try:
                    self._channel.send(wire.answer(numbers[link], link.recv_bytes()))
                except (EOFError, OSError):
                    links.remove(link)  # _watch() reports it

    def _watch(self) -> None:
        """Thread body: sends heartbeats; reports the reason to rank 0 and closes the link when a rank has ended or rank
        0 has been silent."""
        ranks = self.processes.ranks
        while not self._over.wait(wire.HEARTBEAT_INTERVAL_S):
            self._num_silent_checks += 1
            try:
                gone = next((rank for rank in ranks if not rank.stopping and not rank.process.is_alive()), None)
                if gone is not None:
                    raise RankFailure(f"the process of rank {gone.number} ended with {gone.process.exitcode}")
                if self._num_silent_checks > MAX_SILENT_CHECKS:
                    raise RankFailure("rank 0 has sent no frames")
                self._channel.send(wire.heartbeats({rank.number: rank.read_heartbeat() for rank in ranks}))
            except (OSError, RankFailure) as failure:
                with contextlib.suppress(OSError):
                    self._channel.send(wire.FAILURE + str(failure).encode())
                self._channel.close()
                return


class CurrentRun:
    """The current run of all those that a host serves; it ends when the host stops."""

    def __init__(self, stopping: threading.Event) -> None:
        self._stopping = stopping
        self._ranks: NodeRanks | None = None
        self._changing = threading.Lock()
        threading.Thread(target=self._end, name="end of the node", daemon=True).start()

    def run(self, ranks: NodeRanks) -> str:
        """Runs NodeRanks.run(), ended at once if the host is stopping, and returns its reason; keeps no reference to it
        afterwards."""
        with self._changing:
            self._ranks = ranks
        if self._stopping.is_set():
            ranks.end(0.0)  # _end() may have run before the assignment
        try:
            return ranks.run()
        finally:
            with self._changing:
                self._ranks = None

    def _end(self) -> None:
        """Thread body: waits until the host stops, then ends the current run by force."""
        self._stopping.wait()
        with self._changing:
            ranks = self._ranks
        if ranks is not None:
            ranks.end(0.0)
