"""Execution of commands on the device thread, in order, deferring those that must wait for steps in flight."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

from quire.services.worker.engine.commands import (
    AddAdapter,
    Command,
    Deferred,
    EncodeMedia,
    EndEpoch,
    Execute,
    ExecuteDeviceOrder,
    FinishedStep,
    LaunchedStep,
    MoveBlocks,
    PendingMedia,
    PendingMove,
    ReadRows,
    ReleaseGrammar,
    ReleaseMedia,
    RemoveAdapter,
    ResetCache,
    ResultReceiver,
    ShareGrammar,
    StagesFinished,
)
from quire.services.worker.kv_transfer.page_orders import (
    CommitBlocks,
    PageOrder,
    PageOrderQueue,
    PendingPageIO,
    ReadBlocks,
    WriteBlocks,
)
from quire.services.worker.ranks.group import RankFailure, RankGroup
from quire.services.worker.replica.device_orders import RETRYABLE, compensating_order
from quire.services.worker.replica.replica import Replica
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.fetched_item import Rows
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.structured.compile_pool import CompilePool
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2 as pb


class OutcomeHandler(Protocol):
    """Handles the outcomes of commands: replies to the scheduler, or waits for steps and copies. Called on the device
    thread."""

    def is_current(self, receiver: ResultReceiver) -> bool:
        """Returns whether results for `receiver` are still wanted."""

    def step_launched(self, step: LaunchedStep) -> FinishedStep | None:
        """Handles a launched step; returns it if it has finished already, else it returns as a FinishedStep command."""

    def step_pending(self, step: LaunchedStep) -> None:
        """Handles a step that waits for other stages; it returns as a StagesFinished command."""

    def move_started(self, move: PendingMove) -> None:
        """Handles a block transfer that has been started."""

    def media_started(self, pending: PendingMedia) -> None:
        """Handles media items that are being encoded."""

    def media_left(self, command: EncodeMedia) -> None:
        """Handles media items that wait for another call of the encoder; it returns as an EncodeMedia command."""

    def rows_read(self, command: ReadRows, rows: Rows | Exception) -> None:
        """Handles rows that have been read, or the error that prevented it. Re-raises a fatal device error."""

    def page_io_started(self, pending_io: PendingPageIO) -> None:
        """Handles page reads or writes that have been started."""

    def page_io_failed(self, order: PageOrder, error: Exception) -> None:
        """Handles failed page reads or writes. Re-raises a fatal device error."""

    def move_failed(self, receiver: ResultReceiver, transfer_id: int, error: Exception) -> None:
        """Handles a transfer that could not be started: the blocks stay in place. Re-raises a fatal device error."""

    def adapter_added(self, command: AddAdapter, error: Exception | None) -> None:
        """Handles an added adapter, or the error that prevented it. Re-raises a fatal device error."""

    def order_executed(self, command: ExecuteDeviceOrder, error: Exception | None) -> None:
        """Handles an executed device order, or the error that prevented it. Re-raises a fatal device error."""

    def session_violated(self, receiver: ResultReceiver, reason: str) -> None:
        """Ends the session because the scheduler broke its protocol."""

    def step_failed(self, receiver: ResultReceiver, step_id: int, error: Exception) -> None:
        """Logs the error and ends the session because a step failed; a fatal device error or rank failure ends the
        engine."""

    def epoch_ended(self, reply: asyncio.Future[RetainedState], report: RetainedState) -> None: ...


class DeviceExecutor:
    """Executes rank 0's commands on the device thread, broadcasts them to the other ranks, and keeps steps in order.
    Failures of a command become calls of `outcomes`; rank failures and fatal device errors end the engine."""

    def __init__(self, replica: Replica, ranks: RankGroup, grammars: CompilePool, outcomes: OutcomeHandler) -> None:
        self._replica, self._ranks, self._grammars, self._outcomes = replica, ranks, grammars, outcomes
        self._num_in_flight = 0
        self._num_releases = 0  # of media items
        self.maintenance_running = False  # a device order is being executed; its duration is unbounded
        self._pending: deque[LaunchedStep] = deque()  # steps that wait for other stages
        self._end_epoch: EndEpoch | None = None
        self._deferred: deque[Deferred] = deque()  # commands that wait for steps in flight
        self._page_orders = PageOrderQueue(replica.transfers, outcomes)

    def process(self, command: Command) -> None:
        """Executes or defers a command, then every deferred command that no longer has to wait."""
        match command:
            case (
                Execute()
                | ReleaseGrammar()
                | EncodeMedia()
                | ReleaseMedia()
                | MoveBlocks()
                | RemoveAdapter()
                | ExecuteDeviceOrder()
            ):
                self._deferred.append(command)
            case ReadBlocks() | WriteBlocks() | CommitBlocks():
                self._page_orders.process(command)
            case ReadRows():
                self._read_rows(command)
            case FinishedStep():
                self._record(command)
            case StagesFinished():
                self._settle_stages(command.launched)
            case EndEpoch():
                self._end_epoch = command
            case ShareGrammar():
                self._ranks.prepare_grammar(command.order)
            case AddAdapter():
                self._add_adapter(command)
            case ResetCache():
                self._ranks.reset_cache()
                self._replica.reset_cache()
        self._execute_deferred()
        if self._end_epoch and not self._num_in_flight:
            self._grammars.release_all()
            self._ranks.end_epoch()
            self._page_orders.end_epoch()
            self._outcomes.epoch_ended(self._end_epoch.reply, self._replica.end_epoch())
            self._end_epoch = None

    def _execute_deferred(self) -> None:
        """Executes deferred commands in order, up to the first that must wait for steps in flight."""
        while self._deferred:
            command = self._deferred[0]
            if isinstance(command, Execute):
                if self._num_in_flight and self._replica.speculation.waits_before(command.plan):
                    return
                self._execute(command)
            elif isinstance(command, ReleaseGrammar):
                self._grammars.release(command.grammar_id)
                self._ranks.release_grammar(command.grammar_id)
            elif isinstance(command, EncodeMedia):
                self._encode(command)
            elif isinstance(command, ReleaseMedia):
                self._replica.media.release(command.identifier)
                self._ranks.release_media(command.identifier)
                self._num_releases += 1
            elif isinstance(command, MoveBlocks):
                self._move(command)
            elif isinstance(command, RemoveAdapter):
                self._replica.adapters.remove(command.adapter)
            elif self._num_in_flight:
                return
            else:
                self._execute_device_order(command)
            self._deferred.popleft()

    def _execute_device_order(self, command: ExecuteDeviceOrder) -> None:
        """Executes an order on all ranks and reports its outcome; if some rank fails, executed ones are reverted.
        Ignores orders of an ended attachment. Raises RankFailure if the ranks cannot be made equal again."""
        if not self._outcomes.is_current(command.receiver):
            return
        error: Exception | None = None
        self.maintenance_running = True
        try:
            ticket = self._ranks.broadcast_order(command.order)
            try:
                self._replica.execute_order(command.order)
            except Exception as raised:
                error = raised
            refusals = self._ranks.collect_order(ticket)
            if self._ranks.size > 1 and (error is not None or refusals):
                error = self._undo(command.order, error, refusals)
        finally:
            self.maintenance_running = False
        self._outcomes.order_executed(command, error)

    def _undo(self, order: pb.DeviceOrder, own: Exception | None, refusals: list[str]) -> Exception:
        """Reverts an order that only some ranks executed and returns the error to report: rank 0's `own`, else the
        first refusal. Retryable orders are not reverted. Raises RankFailure if the ranks cannot be brought back to the
        same state."""
        num_refusals = len(refusals) + (own is not None)
        back = compensating_order(order)
        if num_refusals < self._ranks.size and order.WhichOneof("order") not in RETRYABLE:
            if back is None:
                raise RankFailure(f"only some ranks executed an order: {own or refusals[0]}")
            ticket = self._ranks.broadcast_order(back)
            self._replica.execute_order(back)
            if self._ranks.collect_order(ticket):
                raise RankFailure("some ranks failed to revert an order")
        return own or FailedPrecondition(refusals[0])

    def _execute(self, command: Execute) -> None:
        """Broadcasts a plan and launches its step; the step then waits for other stages or is reported as launched. A
        violation or error ends the session instead; a plan of an ended attachment is ignored."""
        receiver, plan = command.receiver, command.plan
        if not self._outcomes.is_current(receiver):
            return
        began_ns = time.perf_counter_ns()
        try:
            ticket = self._ranks.broadcast(plan)
            flight = self._replica.launch(plan)
        except PlanViolation as violation:
            self._outcomes.session_violated(receiver, f"step {plan.step_id} breaks the session: {violation}")
            return
        except Exception as error:
            self._outcomes.step_failed(receiver, plan.step_id, error)
            return
        self._num_in_flight += 1
        self._page_orders.step_launched(plan.step_id)
        step = LaunchedStep(receiver, flight, (began_ns - command.arrived_ns) // 1000, ticket)
        self._report_settled()  # earlier steps whose stages this launch waited for
        if flight.launch.heads_launched:
            self._report_launched(step)
        else:
            self._pending.append(step)
            self._outcomes.step_pending(step)

    def _settle_stages(self, step: LaunchedStep) -> None:
        """Launches the heads of a step whose other stages have arrived, unless a later launch did so already, and
        reports every step that is launched by now."""
        if not step.flight.launch.heads_launched:  # otherwise a later launch has waited already
            self._ranks.settle_step()
            self._replica.launch_pending_heads()
        self._report_settled()

    def _report_settled(self) -> None:
        """Reports pending steps, oldest first, up to the first whose heads are not launched."""
        while self._pending and self._pending[0].flight.launch.heads_launched:
            self._report_launched(self._pending.popleft())

    def _report_launched(self, step: LaunchedStep) -> None:
        """Passes a launched step to the outcome handler; on a synchronous device it has finished and is recorded at
        once."""
        finished = self._outcomes.step_launched(step)
        if finished is not None:
            self._record(finished)

    def _encode(self, command: EncodeMedia) -> None:
        """Starts encoding a batch of waiting items on all ranks; further ones are encoded after the commands that have
        arrived meanwhile, so that a step waits for one batch at most. Drops items of ended attachments. Raises
        RankFailure and fatal device errors."""
        orders, is_last = command.waiting.take_batch(self._outcomes.is_current, self._num_releases)
        if orders:
            items = [order.item for order in orders]
            self._ranks.encode_media(items)
            self._outcomes.media_started(PendingMedia(orders, self._replica.media.encode(items)))
        if not is_last:
            self._outcomes.media_left(command)

    def _read_rows(self, command: ReadRows) -> None:
        """Reads rows of media, unless their attachment has ended, and reports them."""
        try:
            if not self._outcomes.is_current(command.receiver):
                raise FailedPrecondition("epoch: the attachment of these rows has ended")
            rows = self._replica.media.read(command.identifier)
        except Exception as error:
            self._outcomes.rows_read(command, error)
        else:
            self._outcomes.rows_read(command, rows)

    def _move(self, command: MoveBlocks) -> None:
        """Starts a block transfer on rank 0, then on the other ranks, and reports it as started. A violation ends the
        session, any other error is reported as failed; raises RankFailure. Ignores orders of an ended attachment."""
        receiver, order = command.receiver, command.order
        if not self._outcomes.is_current(receiver):
            return
        begun_ns = time.perf_counter_ns()
        try:
            pending = self._replica.transfers.move(order)
            self._ranks.move_blocks(order)  # reached only if rank 0 can move them
        except PlanViolation as violation:
            self._outcomes.session_violated(receiver, f"transfer {order.transfer_id} breaks the session: {violation}")
            return
        except RankFailure:
            raise
        except Exception as error:
            self._outcomes.move_failed(receiver, order.transfer_id, error)
            return
        self._outcomes.move_started(PendingMove(receiver, order.transfer_id, pending, begun_ns))

    def _add_adapter(self, command: AddAdapter) -> None:
        """Adds an adapter to the replica and reports the outcome; does nothing if the attachment that requested it has
        ended."""
        if not self._outcomes.is_current(command.receiver):
            return
        error = None
        try:
            self._replica.adapters.add(command.folder, command.digest)
        except Exception as raised:
            error = raised
        self._outcomes.adapter_added(command, error)

    @property
    def num_in_flight(self) -> int:
        """Number of steps that are launched and not recorded. Callable from any thread."""
        return self._num_in_flight

    def _record(self, finished: FinishedStep) -> None:
        """Removes a step from those in flight and updates the replica's slots with its output, unless the step
        failed."""
        self._num_in_flight -= 1
        if finished.output is not None:
            self._replica.record(finished.launched.flight, finished.output)
