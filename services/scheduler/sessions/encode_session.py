"""Session of one encode worker: orders to encode media go down, outcomes come up."""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple, NoReturn

from quire.services.scheduler.cluster.target_state import TargetState
from quire.services.scheduler.cluster.terms import ClusterTerms, check_model, check_name
from quire.services.scheduler.placement.encode_fleet import EncodeFleet
from quire.services.scheduler.replicas.encode_worker import EncodeWorker
from quire.services.scheduler.sessions.open_session import OpenSession
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process import lifecycle
from quire.shared.rpc.duplex import Duplex

log = logger("workers")

MAX_ENCODER_ROWS = 2**24
LAYOUT_BYTES = 32

WorkerSession = Duplex[pb.AttachRequest, pb.AttachResponse]


def check_encode_hello(hello: pb.WorkerHello, terms: ClusterTerms) -> None:
    """Raises FailedPrecondition for an encode worker of another model, and for values out of range."""
    service = f"worker {hello.worker_id}"
    check_name("worker_id", hello.worker_id)
    check_name("address", hello.address)
    for name in ("version", "device"):
        check_name(name, getattr(hello, name), needed=False)
    check_model(hello.model, service)
    encoder = hello.encoder
    if not 1 <= encoder.capacity <= MAX_ENCODER_ROWS:
        text = f"{service} has {encoder.capacity}, needs 1 to {MAX_ENCODER_ROWS}"
        raise FailedPrecondition(f"encoder.capacity: {text}", field="encoder.capacity")
    if len(encoder.layout) != LAYOUT_BYTES:
        text = f"{service} sent {len(encoder.layout)} bytes, needs {LAYOUT_BYTES}"
        raise FailedPrecondition(f"encoder.layout: {text}", field="encoder.layout")
    terms.agree_on_model(hello.model, service)


class EncodeTiming(NamedTuple):
    """Limits of the time in which an encode worker does not answer."""

    check_s: float = 0.25  # interval of the checks
    fetch_s: float = 30.0  # most time to fetch pixels from a slow frontend, in addition to the deadline of a step


ENCODE_TIMING = EncodeTiming()


class EncodeSession:
    """Serves an attached encode worker until it leaves or is lost."""

    def __init__(
        self,
        session: WorkerSession,
        worker: EncodeWorker,
        served: OpenSession,
        fleet: EncodeFleet,
        target: TargetState,
        *,
        deadline_s: float,
        timing: EncodeTiming = ENCODE_TIMING,
    ) -> None:
        """`served`: counts the worker's messages; `target`: weights that it is brought to; `deadline_s`: longest time
        without an answer while it encodes, the fetch of pixels not included."""
        self._session, self._worker, self._served, self._fleet = session, worker, served, fleet
        self._target = target
        self._most_checks = math.ceil((deadline_s + timing.fetch_s) / timing.check_s)
        self._check_s = timing.check_s
        self._left = asyncio.Event()  # set when a leaving worker is not needed any more
        worker.on_users_changed = self._check_left

    async def run(self, metrics: SchedulerMetrics) -> None:
        """Attaches the worker, serves its messages, and detaches it at the end, which starts its jobs again. Raises
        FailedPrecondition for invalid messages."""
        worker, is_left = self._worker, False
        self._fleet.attach(worker)
        log.info("encode worker attached", worker=worker.id, epoch=worker.epoch, rows=worker.hello.encoder.capacity)
        try:
            await lifecycle.run_until_first(
                self._read(), self._left.wait(), self._watch(), self._follow_weights(), self._session.pump()
            )
            is_left = self._left.is_set()
            if not is_left:
                metrics.workers_lost.labels("closed").inc()
        except Unavailable as error:
            metrics.workers_lost.labels("silent").inc()
            log.warning("worker lost", worker=worker.id, epoch=worker.epoch, reason=error.message)
        finally:
            worker.orders.fail_pending()
            self._fleet.detach(worker, lost=not is_left)
            log.info("encode worker detached", worker=worker.id, epoch=worker.epoch, lost=not is_left)

    async def _read(self) -> None:
        """Handles the worker's messages until the stream ends."""
        async for message in self._session.messages():
            self._served.num_messages += 1
            kind = message.WhichOneof("message")
            if kind == "media_prepared":
                self._fleet.receive_prepared(self._worker, message.media_prepared)
            elif kind == "device_order_done":
                self._worker.orders.receive_done(message.device_order_done)
            elif kind == "leaving":
                log.info("worker is leaving", worker=self._worker.id)
                self._worker.leaving = True
                self._check_left()

    def _check_left(self) -> None:
        """Ends the session of a leaving worker when no other worker needs its rows."""
        if self._worker.leaving and not self._worker.num_users:
            self._left.set()

    async def _follow_weights(self) -> NoReturn:
        """Brings the worker to the target weights after each update from a folder, once no other worker needs rows of
        the old ones. Raises Unavailable if it does not answer: it has to attach again."""
        worker, failed = self._worker, 0  # the last update that the worker could not load
        while True:
            await asyncio.sleep(self._check_s)
            target = self._target.weights
            if worker.leaving or worker.num_users or not worker.is_outdated(target) or target.update == failed:
                continue
            try:
                await worker.update_weights(target)
            except Unavailable:
                raise
            except QuireError as error:
                failed = target.update
                text = "an encode worker cannot load the weights; other workers encode by themselves"
                log.warning(text, worker=worker.id, version=target.version, reason=error.message)
            else:
                log.info("an encode worker is up to date", worker=worker.id, version=target.version)

    async def _watch(self) -> None:
        """Raises Unavailable when the worker has had items to encode for too long without an answer."""
        worker, num_answers, num_checks = self._worker, 0, 0
        while num_checks < self._most_checks:  # counts checks, as this process itself may have been stopped
            await asyncio.sleep(self._check_s)
            is_stuck = worker.num_encoding > 0 and worker.num_answers == num_answers
            num_answers, num_checks = worker.num_answers, num_checks + 1 if is_stuck else 0
        raise Unavailable(f"it has answered none of {worker.num_encoding} orders to encode in time")
