"""The other hosts of a replica, as seen by rank 0: they dial it and run ranks for it."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Callable, Sequence

from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.hosts import wire
from quire.services.worker.ranks.hosts.channel import Channel, HostHandshake
from quire.services.worker.ranks.hosts.wire import Welcome
from quire.services.worker.ranks.peer_rank import PeerRank
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.wire import RankReply
from quire.shared.errors import FailedPrecondition, QuireError
from quire.shared.logs import logger

log = logger("worker.ranks")

HANDSHAKE_TIMEOUT_S = 10.0
SEND_TIMEOUT_S = 20  # to a host that does not read


class RemoteRank(PeerRank):
    """A rank on another host, whose replies and heartbeats arrive through its Node."""

    max_silent_checks = 10  # heartbeats come twice a second
    last_heartbeat = -1

    def __init__(self, number: int, node: Node) -> None:
        super().__init__(number)
        self.node, self.heartbeat = node, 0
        self.replies: queue.SimpleQueue[RankReply | None] = queue.SimpleQueue()  # None marks the end of the link

    def terminate(self, deadline: float) -> None:
        """No-op: its host ends it, on STOP or at the end of the link."""

    def failure(self, what: str) -> RankFailure:
        return RankFailure(f"rank {self.number} on node {self.node.number} {what}")

    def _receive(self, timeout_s: float) -> RankReply | None:
        """Returns the next reply, or None after the timeout. Raises RankFailure if the host is lost."""
        try:
            reply = self.replies.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if reply is None:
            self.replies.put(None)
            raise self.failure(f"has disconnected: {self.node.lost_reason}")
        return reply

    def _check_link(self) -> None:
        """Raises RankFailure if the host is lost."""
        if self.node.lost_reason:
            raise self.failure(f"has disconnected: {self.node.lost_reason}")

    def _heartbeat(self) -> int:
        return self.heartbeat


class Node:
    """Another host of the replica with its ranks; `lost_reason` is set when it is lost."""

    def __init__(self, number: int, ranks: range) -> None:
        """Creates the unconnected host with its consecutive `ranks`."""
        self.number = number
        self.lost_reason = ""  # set when the host is lost
        self.ranks = [RemoteRank(rank, self) for rank in ranks]
        self.channel: Channel | None = None

    def run(self, channel: Channel) -> None:
        """Handles the host's frames until the link ends; then sets `lost_reason` and wakes threads that wait for
        replies."""
        try:
            while not self.lost_reason:
                self._handle_frame(channel.receive())
        except (OSError, QuireError, KeyError, ValueError) as error:
            self.lost_reason = f"the link to it has ended: {error}"
        channel.close()
        for rank in self.ranks:
            rank.replies.put(None)

    def _handle_frame(self, frame: bytes) -> None:
        """Stores a reply or heartbeats at their ranks; any other frame is the reason why the host is lost."""
        kind, body = frame[:1], frame[1:]
        by_number = {rank.number: rank for rank in self.ranks}
        if kind == wire.ANSWER:
            (rank,) = wire.RANK.unpack_from(body)
            by_number[rank].replies.put(RankReply.parse(body[wire.RANK.size :]))
        elif kind == wire.HEARTBEATS:
            for number, heartbeat in wire.read_heartbeats(body).items():
                by_number[number].heartbeat = heartbeat
        else:
            self.lost_reason = body.decode(errors="replace")


class Nodes:
    """All other hosts. Each connects once; a replica that has lost one cannot continue."""

    def __init__(
        self,
        num_hosts: int,
        address: str,
        port: int,
        interface: str,
        *,
        handshake: HostHandshake,
        welcome: Callable[[RankPlacement], Welcome],
    ) -> None:
        """`address`, `port`: where the hosts dial; `welcome`: creates the welcome from rank 0's placement."""
        self.num_hosts, self.address, self.interface = num_hosts, address, interface
        self._port, self._handshake, self._welcome = port, handshake, welcome
        self._nodes: list[Node] = []
        self._server: socket.socket | None = None
        self._joining = threading.Lock()

    @property
    def ranks(self) -> Sequence[RemoteRank]:
        return [rank for node in self._nodes for rank in node.ranks]

    def open(self, placement: RankPlacement) -> None:
        """Starts accepting hosts on a thread; does nothing for a single host. `placement`: of rank 0."""
        if self.num_hosts == 1:
            return
        per_host = placement.per_host
        starts = range(per_host, placement.size, per_host)
        self._nodes = [Node(number, range(start, start + per_host)) for number, start in enumerate(starts, start=1)]
        self._server = socket.create_server((self.address, self._port))
        log.info("waiting for other hosts", nodes=self.num_hosts - 1, at=f"{self.address}:{self._port}")
        threading.Thread(target=self._accept, args=(self._server, placement), name="nodes", daemon=True).start()

    def write(self, command: bytes) -> None:
        """Sends a command to all connected hosts, for their ranks. Raises RankFailure for an unreachable one."""
        for node in self._nodes:
            if node.channel is not None:
                try:
                    node.channel.send(command)
                except OSError as error:
                    raise RankFailure(f"node {node.number} is unreachable: {error}") from None

    def close(self) -> None:
        """Closes the server and the links to all hosts, whose ranks then end."""
        if self._server is not None:
            shut_down_server(self._server)
        for node in self._nodes:
            if node.channel is not None:
                node.channel.close()

    def _accept(self, server: socket.socket, placement: RankPlacement) -> None:
        """Thread body: accepts connections, each admitted on its own thread, until the server is closed."""
        while True:
            try:
                link, _ = server.accept()
            except OSError:
                return  # the server is closed
            threading.Thread(target=self._admit, args=(Channel(link), placement), name="node", daemon=True).start()

    def _admit(self, channel: Channel, placement: RankPlacement) -> None:
        """Thread body: authenticates a host, sends it the welcome and handles its frames until the link ends. A failed
        handshake, an unknown node or a second connection is logged and closed."""
        try:
            channel.set_timeout(HANDSHAKE_TIMEOUT_S)
            number = self._handshake.authenticate(channel)
            welcome = self._welcome(placement).to_bytes()
            with self._joining:
                node = self._expected_node(number)
                channel.send(welcome)
                node.channel = channel
        except (OSError, QuireError) as error:
            log.warning("rejected a host", reason=f"{type(error).__name__}: {error}")
            channel.close()
            return
        channel.set_timeout(None)
        channel.set_send_timeout(SEND_TIMEOUT_S)
        log.info("host connected", node=node.number)
        threading.Thread(target=_send_keepalives, args=(node, channel), name="greetings", daemon=True).start()
        node.run(channel)

    def _expected_node(self, number: int) -> Node:
        """Returns the node `number`. Raises FailedPrecondition if it does not exist or is connected."""
        node = next((node for node in self._nodes if node.number == number), None)
        if node is None:
            raise FailedPrecondition(f"node {number} is not in 1..{self.num_hosts - 1}")
        if node.channel is not None:
            raise FailedPrecondition(f"node {number} is connected already")
        return node


def _send_keepalives(node: Node, channel: Channel) -> None:
    """Sends empty frames, so that a host detects that this one hangs."""
    pause = threading.Event()
    while not node.lost_reason:
        try:
            channel.send(wire.KEEPALIVE)
        except OSError:
            return
        pause.wait(wire.HEARTBEAT_INTERVAL_S)


def shut_down_server(server: socket.socket) -> None:
    """Closes a listening socket and unblocks its accept()."""
    with contextlib.suppress(OSError):
        server.shutdown(socket.SHUT_RDWR)
    server.close()


def _no_welcome(_: RankPlacement) -> Welcome:
    raise AssertionError("a single host accepts no others")


SINGLE_HOST = Nodes(1, "", 0, "lo", handshake=HostHandshake(None, ""), welcome=_no_welcome)
