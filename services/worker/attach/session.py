"""The scheduler session: dials the scheduler and attaches again whenever an attachment ends."""

from __future__ import annotations

import asyncio
import functools
from typing import Protocol

import grpc
import grpc.aio

from quire.services.worker.attach import weight_fetch
from quire.services.worker.attach.attachment import Attachment, BrokenSession, Executor, Redirected
from quire.services.worker.attach.route import Route
from quire.services.worker.attach.timing import DEFAULT_TIMING, WorkerTiming
from quire.services.worker.models.loading.weight_spool import WeightSpool
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.pb.worker.v1 import worker_pb2_grpc
from quire.shared.process import lifecycle
from quire.shared.process.lifecycle import Shutdown
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.trust import Dialler
from quire.shared.settings import WorkerSettings

log = logger("worker.session")

Call = grpc.aio.StreamStreamCall[pb.AttachRequest, pb.AttachResponse]
SERVICE_NAME = pb.DESCRIPTOR.services_by_name["WorkerService"].full_name
RPC_ENDED = (grpc.aio.AioRpcError, asyncio.InvalidStateError)  # the latter: a write after the call ended
MAX_BACKOFF_S = 2.0


class SessionObserver(Protocol):
    """Callbacks for the start and end of attachments, on the event loop; attached() is awaited before the first plan is
    read."""

    async def attached(self, welcome: pb.SchedulerWelcome) -> None: ...

    def detached(self, *, broken: bool) -> None:
        """`broken`: the attachment ended by an error of the session, not by losing the scheduler."""


class AttachmentLoop:
    """Attaches to a scheduler again and again; each attachment has a new epoch."""

    def __init__(
        self,
        settings: WorkerSettings,
        engine: Executor,
        hello: pb.WorkerHello,
        observer: SessionObserver,
        shutdown: Shutdown,
        *,
        spool: WeightSpool | None = None,
        timing: WorkerTiming = DEFAULT_TIMING,
    ) -> None:
        """Stores the parts of all attachments; run() dials. `hello`: the fields that do not change between attachments;
        `spool`: receives weights that arrive as a stream, None: such orders fail."""
        self._spool = spool
        self._first_backoff_s = timing.first_backoff_s
        self._dialler = Dialler(f"worker {hello.worker_id}", settings.tls, settings.cluster_secret())
        self._route = Route(settings.schedulers)
        self._drain_timeout_s = settings.drain_timeout_s
        self._engine = engine
        self._hello = hello
        self._observer = observer
        self._shutdown = shutdown
        self._backoff_s = self._first_backoff_s
        self._last_reason = ""

    async def run(self) -> None:
        """Attaches again after every end, with a backoff and, after repeated failures, at the next address. Returns
        after a drain has finished; raises FailedPrecondition if the scheduler refuses this worker for good."""
        while True:
            reason = await self._attach_once()
            if self._shutdown.requested:
                return
            if reason:
                self._log_reason(reason)
                self._route.record_failure()
                await self._back_off()

    def _log_reason(self, reason: str) -> None:
        """Logs a failed attempt as a warning, repetitions of the same reason at debug level."""
        write = log.debug if reason == self._last_reason else log.warning
        write("not attached", scheduler=self._route.address, reason=reason)
        self._last_reason = reason

    async def _attach_once(self) -> str:
        """Dials the current address and runs one attachment there. Returns the reason for its end, or "" after a
        redirect; errors become reasons, except a cancellation of this task and a refusal (FailedPrecondition). Notifies
        the observer."""
        try:
            channel = self._dialler.connect(self._route.address)
        except Unavailable as error:
            return error.message
        async with channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
            fetch = functools.partial(self._fetch_weights, channel)
            attachment = Attachment(call, self._engine, self._shutdown, self._drain_timeout_s, fetch)
            broken = cut = False
            try:
                await lifecycle.run_until_first(call.wait_for_connection(), self._shutdown.wait())
                if not self._shutdown.requested:
                    await self._handshake(call)
                    await attachment.run(self._next_hello(), self._welcomed)
                return "drained"
            except Redirected as elsewhere:
                log.info("redirected", scheduler=self._route.address, to=elsewhere)
                self._route.redirect(str(elsewhere))
                return ""
            except asyncio.CancelledError:
                if is_cancel_requested():
                    raise
                return "the call was cancelled on this side"
            except Exception as error:
                broken = isinstance(error, BrokenSession)
                cut = await _is_connection_lost(error, call)
                return await self._failure_reason(error, call, attachment)
            finally:
                call.cancel()
                self._on_ended(attachment, broken=broken, cut=cut)

    async def _handshake(self, call: Call) -> None:
        """Authenticates both sides of the call with the cluster secret. Raises Unavailable when it times out."""
        address = self._route.address
        try:
            await self._dialler.handshake(
                call, pb.AttachRequest, SERVICE_NAME, address, known=self._route.is_configured
            )
        except TimeoutError:
            raise Unavailable(f"{address} did not complete the handshake in time") from None

    async def _fetch_weights(self, channel: grpc.aio.Channel, order: pb.StageWeights) -> None:
        """Downloads the streamed weights of `order` into the spool, on a separate call of the same channel, and sets
        their location in the order. Raises FailedPrecondition if the worker has no spool, else as
        weight_fetch.fetch()."""
        if self._spool is None:
            raise FailedPrecondition("this worker does not accept streamed weights")
        call = worker_pb2_grpc.WorkerServiceStub(channel).FetchWeights()
        try:
            address, known = self._route.address, self._route.is_configured
            await self._dialler.handshake(call, pb.FetchWeightsRequest, SERVICE_NAME, address, known=known)
            await weight_fetch.fetch(call, self._hello.worker_id, order, self._spool)
        finally:
            call.cancel()

    def _next_hello(self) -> pb.WorkerHello:
        """Returns a copy of the constant hello for the next attachment, with whether a redirect led to it."""
        hello = pb.WorkerHello()
        hello.CopyFrom(self._hello)
        hello.redirected = self._route.redirected
        return hello

    async def _welcomed(self, welcome: pb.SchedulerWelcome) -> None:
        """Records the welcome: its epoch for the next hello, the scheduler's peers for the route; then notifies the
        observer."""
        self._hello.last_epoch = welcome.epoch
        self._route.record_welcome(welcome.peers)
        self._last_reason = ""
        log.info("attached", scheduler=welcome.scheduler_id, epoch=welcome.epoch)
        await self._observer.attached(welcome)

    def _on_ended(self, attachment: Attachment, *, broken: bool, cut: bool) -> None:
        """Records the end of an attachment: notifies the observer if it was welcomed, stores `cut` (its connection was
        lost) for the next hello, and resets the backoff if it produced results."""
        if attachment.epoch:
            self._hello.connection_lost = cut
            self._observer.detached(broken=broken)
        if attachment.num_results:
            self._backoff_s = self._first_backoff_s

    async def _back_off(self) -> None:
        """Waits before the next attempt, at most until shutdown; the wait doubles per failure up to 2 s and
        resets after an attachment with results."""
        await lifecycle.run_until_first(asyncio.sleep(self._backoff_s), self._shutdown.wait())
        self._backoff_s = min(2 * self._backoff_s, MAX_BACKOFF_S)

    async def _failure_reason(self, error: Exception, call: Call, attachment: Attachment) -> str:
        """Returns why the attachment ended, and logs broken sessions and unexpected errors. Raises FailedPrecondition
        if the scheduler refuses this worker. The engine and its cache stay intact for the next attachment."""
        match error:
            case BrokenSession():
                log.error("session broken", epoch=attachment.epoch, reason=error)
                return str(error)
            case QuireError():
                return error.message
        if isinstance(error, RPC_ENDED):
            return await _rpc_failure_reason(call, welcomed=bool(attachment.epoch))
        log.exception("cannot attach to the scheduler", scheduler=self._route.address)
        return f"{type(error).__name__}: {error}"


async def _is_connection_lost(error: Exception, call: Call) -> bool:
    """Returns whether the call ended because its connection was lost (UNAVAILABLE), not by a status of the
    scheduler."""
    return isinstance(error, RPC_ENDED) and await call.code() is grpc.StatusCode.UNAVAILABLE


async def _rpc_failure_reason(call: Call, *, welcomed: bool) -> str:
    """Returns "CODE: details" of an ended call. Raises FailedPrecondition if the scheduler refused with that code
    before its welcome: another attempt cannot succeed."""
    code, details = await call.code(), await call.details()
    if code is grpc.StatusCode.FAILED_PRECONDITION and not welcomed:
        raise FailedPrecondition(f"the scheduler refuses this worker: {details}")
    return f"{code.name}: {details}"
