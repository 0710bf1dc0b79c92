"""quire.scheduler.v1: sessions of frontends."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterable

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.cluster.cluster_view import view_of
from quire.services.scheduler.cluster.terms import check_model, check_name
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.frontends.batches import FROM_WIRE
from quire.services.scheduler.sessions.outbox import Outbox
from quire.shared.columns import u32
from quire.shared.errors import FailedPrecondition, Unavailable
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.logs import logger
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.process import lifecycle
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import CallStream, PartStream
from quire.shared.rpc.trust import HandshakeAcceptor
from quire.shared.settings import SchedulerSettings
from quire.shared.version import VERSION

log = logger("frontends")

FrontendSession = Duplex[pb.SessionRequest, pb.SessionResponse]
VIEW_INTERVAL_S = 0.1
SEQUENCES_PER_TURN = 64  # sequences submitted or cancelled per turn of the event loop
TOKENS_PER_SEQUENCE_COST = 4096  # copying and hashing a prompt of this length costs as much as a sequence


class TurnBudget:
    """Work done for one frontend per turn of the event loop, so that a large message does not delay other services."""

    def __init__(self) -> None:
        self._left = SEQUENCES_PER_TURN

    async def spend(self, sequences: int) -> None:
        """Counts work in units of a sequence; yields to the event loop once when the turn's budget is used up."""
        self._left -= sequences
        if self._left <= 0:
            self._left = SEQUENCES_PER_TURN
            await asyncio.sleep(0)


class FrontendService:
    """Serves one session per frontend: passes submissions and cancellations to the cluster, and publishes the
    cluster's status."""

    def __init__(self, settings: SchedulerSettings, cluster: WorkerCluster, door: HandshakeAcceptor) -> None:
        self._settings = settings
        self._door = door
        self._cluster = cluster
        self._owners = itertools.count(1)
        self._epoch = time.time_ns() // 1_000_000
        self._last_view = pb.ClusterView()
        self.num_rounds = 0  # rounds of publish_views()
        self.hellos: dict[int, pb.FrontendHello] = {}

    @property
    def epoch(self) -> int:
        """Start time of this scheduler process; identifies it."""
        return self._epoch

    async def serve(self, stream: CallStream, caller: str) -> None:
        """Serves a frontend's session to its end. `caller`: the authenticated name, empty if no authentication is
        required. Raises QuireError for an invalid first message or a name that is not the caller's."""
        heartbeat = pb.SessionResponse(heartbeat=pb.Heartbeat())
        session: FrontendSession = Duplex(PartStream(stream), heartbeat, self._settings.heartbeat_interval_ms / 1000)
        hello = await self._hello(session)
        self._door.check_name(caller, f"frontend {hello.frontend_id}")
        await self._serve(session, hello)

    async def publish_views(self) -> None:
        """Publishes status changes to the frontends, at most ten times a second, and checks deadlines of waiting
        sequences."""
        while True:
            await asyncio.sleep(VIEW_INTERVAL_S)
            self._cluster.tick()
            self.publish()
            self.num_rounds += 1

    def publish(self) -> None:
        """Sends the cluster's status to all frontends if it has changed since the last call."""
        view = self._view()
        if view != self._last_view:
            self._last_view = view
            for send in self._cluster.frontends.values():
                send(pb.SessionResponse(cluster=view))

    def _view(self) -> pb.ClusterView:
        return view_of(self._cluster, self._settings.scheduling_policy)

    async def _hello(self, session: FrontendSession) -> pb.FrontendHello:
        """Receives and returns the first message of a session. Raises FailedPrecondition if it is not a valid hello
        or names another model than the cluster's."""
        first = await session.receive()
        kind = first.WhichOneof("message")
        if kind != "hello":
            raise self._door.unexpected_handshake(kind) or FailedPrecondition(
                "the first message of a session must be hello"
            )
        check_name("frontend_id", first.hello.frontend_id)
        for field in ("address", "version", "media_address"):
            check_name(field, getattr(first.hello, field), needed=False)
        check_model(first.hello.model, f"frontend {first.hello.frontend_id}")
        self._cluster.terms.agree_on_model(first.hello.model, f"frontend {first.hello.frontend_id}")
        return first.hello

    async def _serve(self, session: FrontendSession, hello: pb.FrontendHello) -> None:
        """Answers with the welcome and the cluster's status, then serves messages until the frontend leaves or is
        lost; at the end cancels its sequences."""
        owner = next(self._owners)
        welcome = pb.SchedulerWelcome(
            scheduler_id=self._settings.name,
            epoch=self._epoch,
            version=VERSION,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
            takes_further_submissions=True,
        )
        session.send(pb.SessionResponse(welcome=welcome))
        session.send(pb.SessionResponse(cluster=self._view()))
        self._cluster.add_frontend(owner, Outbox(session).send, hello.media_address)
        self.hellos[owner] = hello
        log.info("frontend joined", frontend=hello.frontend_id)
        try:
            await lifecycle.run_until_first(self._read(session, owner), session.pump())
        except Unavailable as error:
            log.warning("frontend lost", frontend=hello.frontend_id, reason=error.message)
        finally:
            del self.hellos[owner]
            await self._remove(owner)
            log.info("frontend left", frontend=hello.frontend_id)

    async def _read(self, session: FrontendSession, owner: int) -> None:
        """Handles the messages of a session until it ends: submissions, cancellations, and weights that other
        schedulers have been updated to."""
        budget = TurnBudget()
        async for message in session.messages():
            kind = message.WhichOneof("message")
            if kind == "submission":
                await self._submit(owner, (message.submission, *message.further_submissions), budget)
            elif kind == "weights":
                self._cluster.target_state.adopt_if_newer(message.weights, self._cluster.replicas.values())
            elif kind == "cancellation":
                cancellation = message.cancellation
                reason = FROM_WIRE.get(cancellation.reason, Reason.CANCELLED)
                sequence_ids = u32(cancellation.sequence_ids)
                for start in range(0, len(sequence_ids), SEQUENCES_PER_TURN):
                    named = sequence_ids[start : start + SEQUENCES_PER_TURN].tolist()
                    self._cluster.cancel(owner, named, reason)
                    await budget.spend(len(named))

    async def _submit(self, owner: int, submissions: Iterable[pb.Submission], budget: TurnBudget) -> None:
        """Passes submissions to the cluster sequence by sequence, yielding to the event loop in between. Raises
        InvalidArgument if an error cannot be reported by sequence id."""
        for submission in submissions:
            cost = 1 + len(submission.token_ids) // (TOKEN_BYTES * TOKENS_PER_SEQUENCE_COST)
            await budget.spend(cost)
            for _ in self._cluster.submit(owner, submission):
                await budget.spend(cost)

    async def _remove(self, owner: int) -> None:
        """Removes a frontend and cancels its sequences, yielding to the event loop in between; if cancelled itself,
        finishes without yielding."""
        budget, removals = TurnBudget(), self._cluster.remove_frontend(owner)
        try:
            for _ in removals:
                await budget.spend(1)
        finally:
            for _ in removals:
                pass
