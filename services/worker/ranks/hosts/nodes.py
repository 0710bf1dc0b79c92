"""The other hosts of a replica, as rank 0 sees them: they dial it, and run ranks that it asks like its own."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Sequence

from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.hosts import wire
from quire.services.worker.ranks.hosts.channel import Channel, Proofs
from quire.services.worker.ranks.hosts.wire import Welcome
from quire.services.worker.ranks.peer_rank import PeerRank
from quire.services.worker.ranks.seat import Seat
from quire.services.worker.ranks.wire import RankReply
from quire.shared.errors import FailedPrecondition, QuireError
from quire.shared.logs import logger

log = logger("worker.ranks")

HANDSHAKE_PATIENCE_S = 10.0
SEND_PATIENCE_S = 20  # of a host that takes nothing


class RemoteRank(PeerRank):
    """A rank of another host."""

    max_silent_checks = 10  # pulses come twice a second
    last_pulse = -1

    def __init__(self, number: int, node: Node) -> None:
        super().__init__(number)
        self.node, self.pulse = node, 0
        self.replies: queue.SimpleQueue[RankReply | None] = queue.SimpleQueue()  # None: the link has ended

    def end(self, deadline: float) -> None:
        """Does nothing: its host ends it, on a command or when the link ends."""

    def failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} on node {self.node.number} {what}")

    def _receive(self, timeout_s: float) -> RankReply | None:
        try:
            reply = self.replies.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if reply is None:
            self.replies.put(None)
            raise self.failure(f"is gone: {self.node.lost}")
        return reply

    def _check_link(self) -> None:
        if self.node.lost:
            raise self.failure(f"is gone: {self.node.lost}")

    def _pulse(self) -> int:
        return self.pulse


class Node:
    """Another host."""

    def __init__(self, number: int, ranks: range) -> None:
        self.number = number
        self.lost = ""  # why
        self.ranks = [RemoteRank(rank, self) for rank in ranks]
        self.channel: Channel | None = None

    def run(self, channel: Channel) -> None:
        """Takes what it says, until the link ends."""
        try:
            while not self.lost:
                self._take(channel.receive())
        except (OSError, QuireError, KeyError, ValueError) as error:
            self.lost = f"the link to it has ended: {error}"
        channel.close()
        for rank in self.ranks:
            rank.replies.put(None)

    def _take(self, frame: bytes) -> None:
        kind, body = frame[:1], frame[1:]
        by_number = {rank.number: rank for rank in self.ranks}
        if kind == wire.ANSWER:
            (rank,) = wire.RANK.unpack_from(body)
            by_number[rank].replies.put(RankReply.decode(body[wire.RANK.size :]))
        elif kind == wire.PULSES:
            for number, pulse in wire.read_pulses(body).items():
                by_number[number].pulse = pulse
        else:
            self.lost = body.decode(errors="replace")


class Nodes:
    """All of them. Each dials once; a replica that has lost one is over."""

    def __init__(
        self,
        num_hosts: int,
        address: str,
        port: int,
        interface: str,
        *,
        proofs: Proofs,
        welcome: Callable[[Seat], Welcome],
    ) -> None:
        """`address`, `port`: where they dial; `welcome`: what they have to know, from the seat of rank 0."""
        self.num_hosts, self.address, self.interface = num_hosts, address, interface
        self._port, self._proofs, self._welcome = port, proofs, welcome
        self._nodes: list[Node] = []
        self._server: socket.socket | None = None
        self._joining = threading.Lock()

    @property
    def ranks(self) -> Sequence[RemoteRank]:
        return [rank for node in self._nodes for rank in node.ranks]

    def open(self, seat: Seat) -> None:
        """Lets them come. `seat`: of rank 0."""
        if self.num_hosts == 1:
            return
        per_host = seat.per_host
        starts = range(per_host, seat.size, per_host)
        self._nodes = [Node(number, range(start, start + per_host)) for number, start in enumerate(starts, start=1)]
        self._server = socket.create_server((self.address, self._port))
        log.info("waiting for other hosts", nodes=self.num_hosts - 1, at=f"{self.address}:{self._port}")
        threading.Thread(target=self._accept, args=(self._server, seat), name="nodes", daemon=True).start()

    def write(self, command: bytes) -> None:
        """To all that have come. Raises RankFailure."""
        for node in self._nodes:
            if node.channel is not None:
                try:
                    node.channel.send(command)
                except OSError as error:
                    raise RankFailure(f"node {node.number} is gone: {error}") from None

    def close(self) -> None:
        if self._server is not None:
            with_shutdown(self._server)
        for node in self._nodes:
            if node.channel is not None:
                node.channel.close()

    def _accept(self, server: socket.socket, seat: Seat) -> None:
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return  # it is closed
            threading.Thread(target=self._admit, args=(Channel(link), seat), name="node", daemon=True).start()

    def _admit(self, channel: Channel, seat: Seat) -> None:
        try:
            channel.patience(HANDSHAKE_PATIENCE_S)
            number = self._proofs.ask(channel)
            welcome = self._welcome(seat).encode()
            with self._joining:
                node = self._expected(number)
                channel.send(welcome)
                node.channel = channel
        except (OSError, QuireError) as error:
            log.warning("a host was turned away", reason=f"{type(error).__name__}: {error}")
            channel.close()
            return
        channel.patience(None)
        channel.bound_sends(SEND_PATIENCE_S)
        log.info("a host has come", node=node.number)
        threading.Thread(target=_greet, args=(node, channel), name="greetings", daemon=True).start()
        node.run(channel)

    def _expected(self, number: int) -> Node:
        node = next((node for node in self._nodes if node.number == number), None)
        if node is None:
            raise FailedPrecondition(f"node {number} is none of 1 to {self.num_hosts - 1}")
        if node.channel is not None:
            raise FailedPrecondition(f"node {number} has come already")
        return node


def _greet(node: Node, channel: Channel) -> None:
    """So that a host hears when this one hangs."""
    pause = threading.Event()
    while not node.lost:
        try:
            channel.send(wire.HELLO)
        except OSError:
            return
        pause.wait(wire.BEAT_S)


def with_shutdown(server: socket.socket) -> None:
    """Whoever waits in accept() hears of it."""
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def _nothing(_: Seat) -> Welcome:
    raise AssertionError("nobody comes")


ALONE = Nodes(1, "", 0, "lo", proofs=Proofs(None, ""), welcome=_nothing)
