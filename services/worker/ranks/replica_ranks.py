"""The other ranks of a replica, started, commanded and ended by rank 0: processes on this host and on others."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Sequence

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from quire.services.worker.codec.media_codec import encode_fetched
from quire.services.worker.codec.step_codec import encode_plan
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.group import RankFailure
from quire.services.worker.ranks.hosts.nodes import SINGLE_HOST, Nodes
from quire.services.worker.ranks.peer_rank import PeerRank
from quire.services.worker.ranks.placement import RankPlacement
from quire.services.worker.ranks.processes import RankProcesses
from quire.services.worker.ranks.wire import ANSWERED, TRANSFER_ID_BYTES, Command, CommandKind, fingerprint
from quire.services.worker.step.fetched_item import Fetched
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.pb.worker.v1 import worker_pb2 as pb

LOOPBACK = "127.0.0.1"
START_TIMEOUT_S = 600.0  # includes loading the weights
REPLY_TIMEOUT_S = 120.0  # a rank that lags behind rank 0 for longer counts as hanging
ORDER_TIMEOUT_S = 600.0  # may include reading weights


def _create_store(host: str, size: int) -> tuple[TCPStore, int]:
    """Creates the rendezvous store and returns it with its port. Binds one address: by default TCPStore listens on all
    of them."""
    with socket.create_server((host, 0)) as server:
        port = server.getsockname()[1]
        store = TCPStore(host, port, size, is_master=True, wait_for_workers=False, master_listen_fd=server.detach())
    return store, port


class ReplicaRanks:
    """Ranks 1 to size - 1 of a replica; implements RankGroup with processes of this host and of `nodes`."""

    def __init__(
        self,
        size: int,
        build: Callable[[RankPlacement], RankReplica],
        stages: int = 1,
        nodes: Nodes = SINGLE_HOST,
        *,
        contexts: int = 1,
    ) -> None:
        """Starts the processes. `build`: builds a rank's part in its process and must be picklable; `stages`,
        `contexts`: numbers of pipeline stages and context groups; `nodes`: the other hosts, with equally many ranks
        each."""
        self.size = size
        host = nodes.address or LOOPBACK
        self._store, port = _create_store(host, size)
        per_host = size // nodes.num_hosts
        self.placements = [
            RankPlacement(rank, size, host, port, stages, per_host, nodes.interface, contexts)
            for rank in range(per_host)
        ]
        self._number = 0  # of the last command
        self._writing = (
            threading.Lock()
        )  # commands come from the device thread, blocks_moved() and stop() from any thread
        self.local = RankProcesses(self.placements[1:], build)
        self.nodes = nodes
        nodes.open(self.placements[0])

    @property
    def _ranks(self) -> Sequence[PeerRank]:
        return (*self.local.ranks, *self.nodes.ranks)

    @property
    def pids(self) -> list[int]:
        """Process ids of the ranks on this host."""
        return [rank.process.pid or 0 for rank in self.local.ranks]

    def wait_ready(self) -> None:
        """Waits until every rank has built its part, loading included. Raises RankFailure."""
        for rank in self._ranks:
            rank.await_reply(0, START_TIMEOUT_S)
            rank.ready = True

    def broadcast(self, plan: StepPlan) -> int:
        """Sends the plan to every rank; returns the ticket for collect(). Raises RankFailure."""
        return self._send(CommandKind.PLAN, encode_plan(plan).SerializeToString())

    def collect(self, ticket: int, inputs: StepInputs) -> None:
        """Waits for every rank's reply to a plan and compares its fingerprint with that of `inputs`. Raises RankFailure
        if a rank failed, was silent for 120 s or derived another step."""
        own = fingerprint(inputs)
        for rank in self._ranks:
            if rank.await_reply(ticket, REPLY_TIMEOUT_S).text != own:
                raise RankFailure(f"rank {rank.number} derived a different step than rank 0")

    def move_blocks(self, order: pb.Transfer) -> None:
        """Makes every rank start its part of a transfer; failures arrive with the next reply. Raises RankFailure."""
        self._send(CommandKind.MOVE_BLOCKS, order.SerializeToString())

    def blocks_moved(self, transfer_id: int) -> None:
        """Makes every rank wait for its part of a transfer. Callable from any thread. Raises RankFailure."""
        self._send(CommandKind.BLOCKS_MOVED, transfer_id.to_bytes(TRANSFER_ID_BYTES, "little"))

    def prepare_grammar(self, order: pb.PrepareGrammar) -> None:
        self._send(CommandKind.PREPARE_GRAMMAR, order.SerializeToString())

    def release_grammar(self, grammar_id: bytes) -> None:
        self._send(CommandKind.RELEASE_GRAMMAR, grammar_id)

    def encode_media(self, items: Sequence[Fetched]) -> None:
        self._send(CommandKind.ENCODE_MEDIA, encode_fetched(items))

    def release_media(self, identifier: bytes) -> None:
        self._send(CommandKind.RELEASE_MEDIA, identifier)

    def settle_step(self) -> None:
        """Makes the ranks of the first stage launch pending heads; sends nothing unless there are several stages of
        several ranks."""
        if self.placements[0].stages > 1 and self.placements[0].width > 1:
            self._send(CommandKind.SETTLE)

    def end_epoch(self) -> None:
        """Makes every rank release all slots, after its steps and transfers, and waits for it. Raises RankFailure."""
        ticket = self._send(CommandKind.END_EPOCH)
        for rank in self._ranks:
            rank.await_reply(ticket, REPLY_TIMEOUT_S)

    def reset_cache(self) -> None:
        self._send(CommandKind.RESET_CACHE)

    def broadcast_order(self, order: pb.DeviceOrder) -> int:
        """Sends the order to every rank; returns the ticket for collect_order(). Raises RankFailure."""
        return self._send(CommandKind.ORDER, order.SerializeToString())

    def collect_order(self, ticket: int) -> list[str]:
        """Waits up to 600 s for each rank's reply to an order; returns "rank N: reason" of those that refused it.
        Raises RankFailure."""
        replies = [rank.await_reply(ticket, ORDER_TIMEOUT_S) for rank in self._ranks]
        pairs = zip(self._ranks, replies, strict=True)
        return [f"rank {rank.number}: {reply.text.decode(errors='replace')}" for rank, reply in pairs if reply.text]

    def check(self) -> None:
        for rank in self._ranks:
            rank.check()

    def stop(self, timeout_s: float) -> None:
        """Sends STOP to all ranks, unless stopping already or `timeout_s` is 0, and kills processes that have not ended
        by then; closes the links to other hosts. Callable from any thread."""
        deadline = time.monotonic() + timeout_s
        stopping = [rank.stopping for rank in self._ranks]
        for rank in self._ranks:
            rank.stopping = True
        if not all(stopping) and timeout_s > 0 and self._writing.acquire(timeout=timeout_s):
            try:
                stop = Command(0, CommandKind.STOP).to_bytes()
                with contextlib.suppress(RankFailure):  # the host detects the end of the link
                    self.nodes.write(stop)
                with contextlib.suppress(RankFailure):  # the processes are killed below
                    self.local.write(stop, timeout_s)
            finally:
                self._writing.release()
        for rank in self._ranks:
            rank.terminate(deadline)
        self.nodes.close()

    def _send(self, kind: CommandKind, body: bytes = b"") -> int:
        """Sends a command to all ranks; returns the number of the last command with a reply, which its replies repeat.
        Raises RankFailure if a host or process cannot be reached."""
        with self._writing:
            self._number += kind in ANSWERED
            data = Command(self._number if kind in ANSWERED else 0, kind, body).to_bytes()
            self.nodes.write(data)
            self.local.write(data, REPLY_TIMEOUT_S)
        return self._number
