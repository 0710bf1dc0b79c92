"""Keeps a session open to one scheduler address: dials, exchanges greetings, runs the session, and reconnects."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import grpc
import grpc.aio

from quire.services.frontend.scheduler_client.session import Link, Session, SessionOwner
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.models import model_identity
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2_grpc
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.trust import Dialler

log = logger("scheduler_client")

Call = grpc.aio.StreamStreamCall[pb.SessionRequest, pb.SessionResponse]

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name
GREETING_TIMEOUT_S = 5.0
FIRST_PAUSE_S = 0.05


@dataclass(frozen=True, slots=True)
class ConnectionTiming:
    """Times of the connections to schedulers, in seconds."""

    longest_pause_s: float = 2.0  # between two attempts
    forget_after_s: float = 10.0  # without session and registry entry; longer than a lease and a restart


DEFAULT_TIMING = ConnectionTiming()


class ConnectionOwner(SessionOwner, Protocol):
    """Callbacks of a connection to the client, which owns the sessions."""

    def on_open(self, session: Session) -> None:
        """Called when the session accepts submissions."""

    def on_broken(self, session: Session) -> None:
        """Called when the session has closed; its sequences must be resubmitted elsewhere."""

    def find_session(self, welcome: pb.SchedulerWelcome) -> Session | None:
        """Returns the open session with the same scheduler process, reached through another address, or None."""


class Backoff:
    """Exponential backoff with jitter, so that frontends do not reconnect in lockstep."""

    def __init__(self, longest_pause_s: float) -> None:
        self._longest_pause_s = longest_pause_s
        self._pause_s = FIRST_PAUSE_S

    def reset(self) -> None:
        self._pause_s = FIRST_PAUSE_S

    def next_s(self) -> float:
        """Returns the pause before the next attempt, in seconds, and doubles the one after it up to the longest."""
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, self._longest_pause_s)
        return pause_s * random.uniform(0.5, 1.0)


class Connection:
    """Connection to the scheduler at `address`; `run()` ends only on a mismatch that no reconnect can fix.

    A scheduler that already has a session through another address is left alone until that session closes.
    """

    def __init__(
        self,
        address: str,
        hello: pb.FrontendHello,
        owner: ConnectionOwner,
        dialler: Dialler,
        *,
        known: bool,
        longest_pause_s: float,
    ) -> None:
        """Prepares the connection. `known`: the address is from the settings, not from the registry."""
        self.address = address
        self._dialler = dialler
        self._known = known
        self._hello = hello
        self._owner = owner
        self._longest_pause_s = longest_pause_s
        self._back_off = Backoff(longest_pause_s)
        self._is_down = False
        self._down_since_s = asyncio.get_running_loop().time()
        self.num_attempts = 0
        self.session: Session | None = None
        self.duplicate_of: Session | None = None

    @property
    def outage_s(self) -> float:
        """Seconds since the last session closed; 0 while one is open."""
        return 0.0 if self.session is not None else asyncio.get_running_loop().time() - self._down_since_s

    @property
    def is_disconnected(self) -> bool:
        """Whether a session is wanted and none is open."""
        return self.session is None and self.duplicate_of is None

    async def run(self) -> None:
        """Connects again after each session, with backoff; next to a session through another address, only when that
        closes. Raises FailedPrecondition."""
        while True:
            self.num_attempts += 1
            await self.connect_once()
            await self._wait_to_reconnect()

    async def _wait_to_reconnect(self) -> None:
        """Waits for the backoff, or until the session through another address has closed."""
        if self.duplicate_of is None:
            await asyncio.sleep(self._back_off.next_s())
            return
        log.info(
            "scheduler already connected through another address",
            scheduler=self.duplicate_of.scheduler_id,
            address=self.address,
        )
        await self.duplicate_of.closed.wait()
        self.duplicate_of = None

    async def connect_once(self) -> None:
        """Connects and runs a session until it breaks. Each attempt opens a new channel, since certificates may have
        changed."""
        try:
            channel = self._dialler.connect(self.address)
        except Unavailable as error:
            self._report(error.message)
            return
        async with channel:
            await self._call(scheduler_pb2_grpc.SchedulerServiceStub(channel).Session())

    async def _call(self, call: Call) -> None:
        """Runs one call to the scheduler and logs why it ended. Raises only FailedPrecondition, and CancelledError if
        this task is cancelled."""
        try:
            await self._run_call(call)
        except FailedPrecondition:
            raise
        except (grpc.RpcError, asyncio.InvalidStateError, TimeoutError, QuireError) as error:
            self._report(await self._close_reason(call, error))
        except asyncio.CancelledError:
            if is_cancel_requested():
                raise
            self._report("the call was cancelled on this side")
        except Exception:  # a malformed message ends the session, not the process
            log.exception("session failed", scheduler=self.address)
        finally:
            call.cancel()

    def _report(self, reason: str) -> None:
        """Logs a failed attempt: a warning once per outage, then at debug level."""
        write = log.debug if self._is_down else log.warning
        write("no session", scheduler=self.address, reason=reason)
        self._is_down = True

    async def _run_call(self, call: Call) -> None:
        """Exchanges handshake, hello and welcome, then runs the session unless the scheduler has one already. Raises
        TimeoutError, FailedPrecondition for another model."""
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            await self._dialler.handshake(call, pb.SessionRequest, SERVICE_NAME, self.address, known=self._known)
            await call.write(pb.SessionRequest(hello=self._hello))
            welcome = (await self._greeting(call, "welcome")).welcome
            view = (await self._greeting(call, "cluster")).cluster
        check = partial(self._check, welcome.scheduler_id)
        check(view)
        self.duplicate_of = self._owner.find_session(welcome)
        if self.duplicate_of is None:
            heartbeat = pb.SessionRequest(heartbeat=pb.Heartbeat())
            link: Link = Duplex(PartStream(call), heartbeat, welcome.heartbeat_interval_ms / 1000)
            session = Session(link, self._owner, welcome, check)
            session.view = view
            await self._run(session)

    async def _run(self, session: Session) -> None:
        """Runs an open session and reports its begin and end to the owner; one that lasted resets the backoff."""
        self._is_down = False
        self.session = session
        log.info("session open", scheduler=session.scheduler_id, address=self.address, epoch=session.epoch)
        opened_s = asyncio.get_running_loop().time()
        try:
            self._owner.on_open(session)
            await session.run()
        finally:
            self.session = None
            self._down_since_s = asyncio.get_running_loop().time()
            self._owner.on_broken(session)
            if self._down_since_s - opened_s > self._longest_pause_s:
                self._back_off.reset()

    async def _greeting(self, call: Call, kind: str) -> pb.SessionResponse:
        """Returns the next message, which must be of this kind. Raises Unavailable at the end of the call,
        FailedPrecondition for another kind."""
        message: Any = await call.read()  # or grpc.aio.EOF
        if message is grpc.aio.EOF:
            raise Unavailable("the scheduler closed the session before it opened")
        if message.WhichOneof("message") != kind:
            raise FailedPrecondition(f"scheduler at {self.address} sent no {kind} where the protocol requires one")
        return cast(pb.SessionResponse, message)

    def _check(self, scheduler_id: str, view: pb.ClusterView) -> None:
        """Raises FailedPrecondition if the cluster's model differs from the frontend's; a view without model passes."""
        if not view.HasField("model"):
            return
        differs = model_identity.mismatch(
            self._hello.model, view.model, f"frontend {self._hello.frontend_id}", f"scheduler {scheduler_id}"
        )
        if differs:
            raise FailedPrecondition(differs, field="model")

    async def _close_reason(self, call: Call, error: Exception) -> str:
        """Returns why the call ended, from the scheduler's status. Raises FailedPrecondition if the scheduler refuses
        this frontend."""
        if isinstance(error, QuireError) or not call.done():
            return str(error) or type(error).__name__
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            raise FailedPrecondition(details or "the scheduler refuses this frontend", field="model")
        return f"{code.name}: {details}"
