"""Routing of outcomes: results and replies to the event loop, finished steps back to the device thread. Separate
threads wait for steps and transfers."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from quire.services.worker.device.device import is_fatal_device_error
from quire.services.worker.engine.commands import (
    AddAdapter,
    Command,
    EncodeMedia,
    ExecuteDeviceOrder,
    FinishedStep,
    LaunchedStep,
    PendingMedia,
    PendingMove,
    ReadRows,
    ResultReceiver,
    StagesFinished,
)
from quire.services.worker.engine.replies import Replies
from quire.services.worker.engine.waiter import Waiter
from quire.services.worker.kv_transfer.page_orders import PageOrder, PendingPageIO
from quire.services.worker.ranks.group import RankFailure, RankGroup
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.fetched_item import Rows
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.errors import Internal
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("worker.engine")

PendingCopying = PendingMove | PendingPageIO | PendingMedia
Deliver = Callable[[ResultReceiver, StepResult, StepInputs], None]


class OutcomeDispatcher:
    """Implements OutcomeHandler for the engine: replies on the event loop, returns finished steps to the device thread,
    and waits for asynchronous steps and copies on its own threads."""

    def __init__(
        self,
        replies: Replies,
        ranks: RankGroup,
        *,
        requeue: Callable[[Command], None],
        deliver: Deliver,
        died: Callable[[BaseException], None],
        synchronous: bool,
        staged: bool,
    ) -> None:
        """Starts the waiting threads that the device and stages need. `requeue`: queues a command for the device
        thread; `deliver`: called with results, on the event loop; `died`: called with fatal device errors;
        `synchronous`, `staged`: as in Engine."""
        self._replies, self._ranks = replies, ranks
        self._requeue, self._deliver, self._died = requeue, deliver, died
        self._broken: ResultReceiver | None = None  # attachment whose later plans are skipped
        self._steps: Waiter[LaunchedStep] | None = None  # None: steps are finished when launched
        self._moves: Waiter[PendingCopying] | None = None  # None: copies are finished when started
        self._arrivals: Waiter[LaunchedStep] | None = None  # None: no other stages
        if not synchronous:
            self._steps = Waiter("waiting", "steps", self._finish_apart, died)
            self._moves = Waiter("moving", "blocks", self._finish_move, died)
        if staged:
            self._arrivals = Waiter("arrivals", "other stages", self._await_arrival, died)

    def stop(self) -> list[threading.Thread]:
        """Stops the waiting threads after their queued items; returns them, to be joined."""
        return [waiter.stop() for waiter in (self._steps, self._moves, self._arrivals) if waiter is not None]

    # On the device thread

    def is_current(self, receiver: ResultReceiver) -> bool:
        """Returns whether `receiver` is the current attachment and no step of it has failed."""
        return receiver is self._replies.receiver and receiver is not self._broken

    def step_launched(self, step: LaunchedStep) -> FinishedStep | None:
        """Finishes the step at once on a synchronous device; otherwise queues it for the waiting thread and returns
        None."""
        if self._steps is None:
            return self._finish(step)
        self._steps.put(step)
        return None

    def step_pending(self, step: LaunchedStep) -> None:
        """Queues the step for the thread that waits for the other stages; it returns as StagesFinished."""
        assert self._arrivals is not None, "only a staged replica has pending steps"
        self._arrivals.put(step)

    def epoch_ended(self, reply: asyncio.Future[RetainedState], report: RetainedState) -> None:
        self._replies.resolve(reply, report)

    def move_started(self, move: PendingMove) -> None:
        self._await_move(move)

    def media_started(self, pending: PendingMedia) -> None:
        self._await_move(pending)

    def media_left(self, command: EncodeMedia) -> None:
        """Queues the command again, after the plans that have arrived."""
        self._requeue(command)

    def rows_read(self, command: ReadRows, rows: Rows | Exception) -> None:
        """Replies with rows or the error. Re-raises a fatal device error."""
        if not isinstance(rows, Exception):
            self._replies.resolve(command.reply, rows)
            return
        if is_fatal_device_error(rows):
            raise rows
        self._replies.fail(command.reply, rows)

    def page_io_started(self, pending_io: PendingPageIO) -> None:
        self._await_move(pending_io)

    def page_io_failed(self, order: PageOrder, error: Exception) -> None:
        """Fails the order's reply. Re-raises a fatal device error."""
        if is_fatal_device_error(error):
            raise error
        self._replies.fail(order.reply, error)

    def move_failed(self, receiver: ResultReceiver, transfer_id: int, error: Exception) -> None:
        """Reports the failed transfer to the scheduler. Re-raises a fatal device error."""
        if is_fatal_device_error(error):
            raise error
        self._replies.move_failed(receiver, transfer_id, error)

    def adapter_added(self, command: AddAdapter, error: Exception | None) -> None:
        """Logs and replies that an adapter was loaded or why not. Re-raises a fatal device error."""
        if error is not None and is_fatal_device_error(error):
            raise error
        name = command.folder.name
        if error is None:
            log.info("adapter loaded", adapter=name, digest=command.digest.hex()[:16])
            self._replies.adapter_loaded(command.receiver, command.order_id, command.digest)
        else:
            log.warning("cannot load an adapter", adapter=name, error=f"{type(error).__name__}: {error}")
            self._replies.adapter_failed(command.receiver, command.order_id, error)

    def order_executed(self, command: ExecuteDeviceOrder, error: Exception | None) -> None:
        """Replies with the order's outcome. Re-raises a fatal device error."""
        if error is not None and is_fatal_device_error(error):
            raise error
        self._replies.order_done(command.receiver, command.order, error)

    def _await_move(self, move: PendingCopying) -> None:
        """Waits for a started copy on its own thread, or at once on a synchronous device, where it has finished."""
        if self._moves is None:
            self._finish_move(move)
        else:
            self._moves.put(move)

    # On the waiting threads (on the device thread, if the device is synchronous)

    def _finish_move(self, move: PendingCopying) -> None:
        """Waits for a copy, also on the other ranks, and replies. A fatal device error is raised; the next step meets
        it as well."""
        if isinstance(move, PendingMedia):
            self._finish_media(move)
            return
        move.pending.wait()
        if isinstance(move, PendingPageIO):
            self._replies.resolve(move.order.reply, move.content)
            return
        self._ranks.blocks_moved(move.transfer_id)
        took_us = (time.perf_counter_ns() - move.begun_ns) // 1000
        done = pb.Transferred(transfer_id=move.transfer_id, transfer_us=took_us)
        self._replies.blocks_transferred(move.receiver, done)

    def _finish_media(self, pending: PendingMedia) -> None:
        """Waits until media items are encoded and replies for each. A fatal device error is raised."""
        pending.batch.wait()
        for order, error in zip(pending.orders, pending.batch.errors, strict=True):
            self._replies.post(order.finish, error)

    def _await_arrival(self, step: LaunchedStep) -> None:
        """Waits for the output of the other stages, then queues StagesFinished for the device thread."""
        step.flight.launch.await_remote_stages()
        self._requeue(StagesFinished(step))

    def _finish_apart(self, step: LaunchedStep) -> None:
        """Waits for a step on the waiting thread and returns it to the device thread."""
        self._requeue(self._finish(step))

    def _finish(self, step: LaunchedStep) -> FinishedStep:
        """Waits for a step and its other ranks and posts its result to the event loop. An error ends the session; the
        returned FinishedStep then has no output."""
        flight = step.flight
        try:
            output = flight.launch.wait()
            self._ranks.collect(step.ticket, flight.inputs)
            result = flight.result(output, step.wait_us)
        except Exception as error:
            self.step_failed(step.receiver, flight.step_id, error)
            return FinishedStep(step, None)
        self._replies.post(self._deliver, step.receiver, result, flight.inputs)
        return FinishedStep(step, output)

    # On any of these threads

    def session_violated(self, receiver: ResultReceiver, reason: str) -> None:
        """Skips later plans of `receiver` and ends its attachment with `reason`."""
        self._broken = receiver
        self._replies.post(receiver.abort_session, reason)

    def step_failed(self, receiver: ResultReceiver, step_id: int, error: Exception) -> None:
        """Logs the current exception and ends the session; a fatal device error or rank failure is also passed to
        `died`, which ends the engine."""
        log.exception("step failed", step=step_id)
        self.session_violated(receiver, f"step {step_id} failed: {type(error).__name__}: {error}")
        if is_fatal_device_error(error):
            self._died(Internal(f"fatal device error: {error}"))
        elif isinstance(error, RankFailure):
            self._died(error)
