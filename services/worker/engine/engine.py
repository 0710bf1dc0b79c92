"""The engine: queues commands for the device thread and delivers results on the event loop.

On CUDA a step is launched before the previous one has ended; a second thread sleeps until the device has passed the end
of a step and forwards its tokens, so that the device thread can launch the next one. On the CPU a launch is the whole
step. All threads sleep while there is no work."""

from __future__ import annotations

import asyncio
import queue
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from google.protobuf.message import DecodeError

from quire.services.worker.engine.commands import (
    AddAdapter,
    EncodeMedia,
    EndEpoch,
    Execute,
    ExecuteDeviceOrder,
    MoveBlocks,
    ReadRows,
    ReleaseGrammar,
    ReleaseMedia,
    RemoveAdapter,
    ResetCache,
    ResultReceiver,
    ShareGrammar,
)
from quire.services.worker.engine.device_thread import Commands, DeviceThread
from quire.services.worker.engine.media_orders import MediaOrders
from quire.services.worker.engine.outcomes import OutcomeDispatcher
from quire.services.worker.engine.replies import Replies, as_failure, set_exception
from quire.services.worker.host.background import BackgroundThreads
from quire.services.worker.kv_transfer.fetcher import Fetcher
from quire.services.worker.kv_transfer.page_orders import PageOrder
from quire.services.worker.lora.peft.folders import AdapterFolders
from quire.services.worker.lora.peft.peft_folder import PeftFolder
from quire.services.worker.lora.peft.reader import AdapterReader
from quire.services.worker.media.pixels import NO_ROWS, PixelSource, RowSource
from quire.services.worker.media.waiting import WaitingMedia
from quire.services.worker.ranks.group import OneRank, RankFailure, RankGroup
from quire.services.worker.replica.device_orders import DURING_STEPS
from quire.services.worker.replica.replica import Occupancy, Replica
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.runner.expert_load import LoadByLayer
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared import columns
from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError, to_proto
from quire.shared.logs import logger
from quire.shared.metrics.worker import StepCost
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("worker.engine")

MAX_STALLED_CHECKS = 240  # calls of check_ranks() without progress: two minutes at the interval of worker/service.py


class StepObserver(Protocol):
    """Callbacks for every step, compiled grammar and media item, on the event loop."""

    def observe_step(self, result: StepResult, num_tokens: int, cost: StepCost) -> None: ...

    def grammar_prepared(self, prepared: CompileResult) -> None: ...

    def media_prepared(self, fetch_us: int, encode_us: int, *, outcome: str) -> None: ...


class Engine:
    """Submits work to the device and tracks what is unanswered. Used on the event loop only."""

    def __init__(
        self,
        build: Callable[[], Replica],
        observer: StepObserver,
        *,
        grammars: CompilePool,
        synchronous: bool,
        ranks: RankGroup | None = None,
        adapters: AdapterReader | None = None,
        staged: bool = False,
    ) -> None:
        """Starts the device thread, which builds the replica and resolves `started`. `build`: builds rank 0's part of
        the replica, on that thread; `synchronous`: launches return when they are done; `ranks`: None for a single rank;
        `adapters`: None if no adapters can be loaded at run time; `staged`: other ranks own other layers."""
        self._adapters = adapters or AdapterReader(AdapterFolders((), 1))
        self._grammars = grammars
        self._observer = observer
        self.ranks: RankGroup = ranks or OneRank()
        self._loop = asyncio.get_running_loop()
        self._replies = Replies(self._loop)
        self.fetcher: Fetcher | None = None  # None: no blocks are fetched from other workers
        self.media: MediaOrders | None = None  # None: no media are encoded
        self._num_stalled_checks, self._last_progress = 0, object()
        self._stager: BackgroundThreads | None = None  # created for the first order that runs during steps
        self.last_step_s: float | None = None  # time.monotonic() when a step last ended
        self._pending_s: deque[float] = deque()  # arrival times of plans without a result
        # The replica, for its constant attributes: only the device thread may call its methods.
        self.started: asyncio.Future[Replica] = self._loop.create_future()
        self.died: asyncio.Future[None] = self._loop.create_future()
        died = partial(self._replies.fail, self.died)
        self._inbox: Commands = queue.SimpleQueue()
        self._outcomes = OutcomeDispatcher(
            self._replies,
            self.ranks,
            requeue=self._inbox.put,
            deliver=self._deliver,
            died=died,
            synchronous=synchronous,
            staged=staged,
        )
        self._device = DeviceThread(
            build,
            self._inbox,
            self._outcomes,
            ranks=self.ranks,
            grammars=grammars,
            replies=self._replies,
            started=self.started,
            died=died,
        )

    @property
    def oldest_pending_s(self) -> float:
        """Age in seconds of the oldest plan without a result; 0 if every plan is answered. Callable from any thread."""
        try:
            return time.monotonic() - self._pending_s[0]
        except IndexError:
            return 0.0

    def progress(self) -> dict[str, object]:
        """Returns the device thread's progress while it has work, else {}."""
        return self._device.progress()

    @property
    def occupancy(self) -> Occupancy:
        return self._device.occupancy

    @property
    def expert_load(self) -> LoadByLayer:
        return self._device.expert_load

    async def start_epoch(self, receiver: ResultReceiver) -> RetainedState:
        """Ends the previous attachment and starts that of `receiver`; returns the state that the worker retained."""
        self._replies.receiver = receiver
        self._pending_s.clear()
        if self.media is not None:
            self.media.start_epoch(receiver)
        reply: asyncio.Future[RetainedState] = self._loop.create_future()
        self._inbox.put(EndEpoch(reply))
        return await reply

    def submit(self, receiver: ResultReceiver, plan: StepPlan) -> None:
        """Queues a plan for the device thread; `receiver` gets its result, or abort_session() if it fails."""
        self._pending_s.append(time.monotonic())
        self._inbox.put(Execute(receiver, plan, time.perf_counter_ns()))

    def transfer(self, receiver: ResultReceiver, order: pb.Transfer) -> None:
        """Queues a transfer between device and host memory, which starts after the submitted plans; `receiver` gets its
        end."""
        self._inbox.put(MoveBlocks(receiver, order))

    def disk_transfer(self, receiver: ResultReceiver, order: pb.DiskTransfer) -> None:
        """Starts a transfer between host memory and disk, concurrently with steps and other transfers; `receiver` gets
        its end with the blocks that were lost. An invalid order ends the session."""

        def on_moved(lost: list[int], took_us: int) -> None:
            """Reports a finished transfer; `lost`: indices in the order of blocks that could not be written or read."""
            column = columns.u32_bytes(lost)
            done = pb.Transferred(transfer_id=order.transfer_id, transfer_us=took_us, lost_blocks=column)
            self._replies.blocks_transferred(receiver, done)

        try:
            self.started.result().transfers.move_on_disk(order, on_moved)
        except PlanViolation as violation:
            receiver.abort_session(f"disk transfer {order.transfer_id} breaks the session: {violation}")

    def fetch_blocks(self, receiver: ResultReceiver, order: pb.FetchBlocks) -> None:
        """Starts fetching blocks from another worker, concurrently with steps; `receiver` gets the outcome. Ends the
        session if this worker fetches no blocks."""
        if self.fetcher is None:
            receiver.abort_session("this worker's hello states that it fetches no blocks")
        else:
            self.fetcher.fetch(receiver, order)

    @property
    def receiver(self) -> ResultReceiver | None:
        """The attachment whose results are delivered."""
        return self._replies.receiver

    async def run_page_order(self, make: Callable[[asyncio.Future[Any]], PageOrder]) -> Any:
        """Submits an order about pages and returns its reply; raises the order's error."""
        return await self.run_on_device(make)

    async def run_on_device(self, make: Callable[[asyncio.Future[Any]], PageOrder | ReadRows]) -> Any:
        """Submits a command that is replied to and returns its reply; raises the command's error."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._inbox.put(make(reply))
        return await reply

    def reset_cache(self) -> None:
        """Makes all ranks discard their cached KV, in the order of submitted commands."""
        self._inbox.put(ResetCache())

    def prepare_grammar(self, receiver: ResultReceiver, order: pb.PrepareGrammar) -> None:
        """Starts compiling a grammar on all ranks, concurrently with steps; `receiver` gets the outcome, an
        InvalidArgument for bytes that are no StructuredOutput."""
        grammar_id = order.grammar_id

        def done(prepared: CompileResult) -> None:
            self._replies.post(self._observer.grammar_prepared, prepared)
            self._replies.grammar_prepared(receiver, grammar_id, prepared)

        try:
            constraint = sampling_pb2.StructuredOutput.FromString(order.grammar)
        except DecodeError:  # schedulers do not parse it
            done(CompileResult(InvalidArgument("grammar: not a serialized StructuredOutput", field="grammar"), 0))
        else:
            self._inbox.put(ShareGrammar(order))
            self._grammars.prepare(grammar_id, constraint, done)

    def release_grammar(self, grammar_id: bytes) -> None:
        """Releases a grammar after the submitted plans, which may use it."""
        self._inbox.put(ReleaseGrammar(grammar_id))

    def use_media(self, source: PixelSource, most_items: int = 0, *, rows: RowSource = NO_ROWS) -> None:
        """Enables the encoding of media, whose pixels come from `source`. `most_items`: items of one call of the
        encoder; 0: by their pixels; `rows`: source of what other workers have encoded."""

        def encode(waiting: WaitingMedia) -> None:
            self._inbox.put(EncodeMedia(waiting))

        self.media = MediaOrders(source, encode, self._observer, most_items, rows=rows)

    def prepare_media(self, receiver: ResultReceiver, order: pb.PrepareMedia) -> None:
        """Starts fetching and encoding a media item, concurrently with steps; `receiver` gets the outcome. Ends the
        session if this worker has no encoder."""
        if self.media is None:
            receiver.abort_session("this worker has announced no encoder for media")
        else:
            self.media.prepare(receiver, order)

    def release_media(self, identifier: bytes) -> None:
        """Releases the rows of a media item after the submitted plans, which may use them."""
        if self.media is not None:
            self.media.count_release()
        self._inbox.put(ReleaseMedia(identifier))

    def load_adapter(self, receiver: ResultReceiver, order: pb.LoadAdapter) -> None:
        """Reads an adapter from its folder concurrently with steps, then adds it between two steps; `receiver` gets the
        outcome. Fails with FailedPrecondition if this worker loads no adapters at run time."""
        if not self._max_adapters:
            error = FailedPrecondition("lora_folders: empty, so this worker loads no adapters at run time")
            receiver.adapter_loaded(pb.AdapterLoaded(order_id=order.order_id, error=to_proto(error)))
            return

        def done(outcome: tuple[PeftFolder, bytes] | QuireError) -> None:
            """Queues the adapter that was read for the device thread, or reports why it cannot be read."""
            if isinstance(outcome, QuireError):
                self._replies.adapter_failed(receiver, order.order_id, outcome)
            else:
                self._inbox.put(AddAdapter(receiver, order.order_id, *outcome))

        self._adapters.read(order.name, order.path, order.digest, done)

    def device_order(self, receiver: ResultReceiver, order: pb.DeviceOrder) -> None:
        """Executes a device order after the submitted plans, or, if it concerns staged weights and the replica permits
        it, on a background thread during steps, in the order of submission. An order to leave a weights group first
        interrupts receiving in it; `receiver` gets the outcome."""
        orders, kind = self.started.result().orders, order.WhichOneof("order")
        orders.interrupt(order)
        if kind not in DURING_STEPS or not orders.stages_beside_steps:
            self._inbox.put(ExecuteDeviceOrder(receiver, order))
            return

        def run() -> None:
            """Executes the order on the background thread and replies. Drops staged weights if the attachment has
            ended."""
            error: Exception | None = None
            try:
                with torch.inference_mode():
                    orders.drop_weights() if kind == "drop_weights" else orders.execute_order(order)
            except BaseException as raised:  # an unanswered order would block all later ones
                error = as_failure(raised)
            if not self._outcomes.is_current(receiver):
                orders.drop_weights()
            self._replies.order_done(receiver, order, error)

        if self._stager is None:
            self._stager = BackgroundThreads("weights", begin=lambda: torch.set_num_threads(1))
        self._stager.submit(run)

    @property
    def _max_adapters(self) -> int:
        return self.started.result().adapters.max_adapters

    def unload_adapter(self, order: pb.UnloadAdapter) -> None:
        """Removes an adapter after the submitted plans, which may use it."""
        self._inbox.put(RemoveAdapter(AdapterId(order.name, order.digest)))

    def check_ranks(self) -> None:
        """Stops all ranks and fails `died` with RankFailure if a rank has died or hangs. Does not block."""
        try:
            self.ranks.check()
            self._check_progress()
        except RankFailure as failure:
            self.ranks.stop(0.0)  # ends collectives that wait for the failed rank
            set_exception(self.died, failure)

    def _check_progress(self) -> None:
        """Raises RankFailure after MAX_STALLED_CHECKS calls without a finished command: a collective that some ranks
        never join blocks forever. Does nothing for a single rank."""
        done = self.progress().get("device") if self.ranks.size > 1 else None
        self._num_stalled_checks = (
            self._num_stalled_checks + 1 if done is not None and done == self._last_progress else 0
        )
        self._last_progress = done
        if self._num_stalled_checks > MAX_STALLED_CHECKS:
            raise RankFailure("the ranks are stuck in a step")

    async def stop(self, timeout_s: float) -> bool:
        """Stops all threads after their queued work, then the ranks; returns whether the threads ended within
        `timeout_s`."""
        threads = [self._device.stop(), *self._outcomes.stop()]
        deadline = self._loop.time() + timeout_s
        for thread in threads:
            await asyncio.to_thread(thread.join, max(0.0, deadline - self._loop.time()))
        await asyncio.to_thread(self.ranks.stop, max(0.0, deadline - self._loop.time()))
        return not any(thread.is_alive() for thread in threads)

    # On the event loop

    def _deliver(self, receiver: ResultReceiver, result: StepResult, inputs: StepInputs) -> None:
        """Sends a result to its receiver, if that is still the current attachment, and passes it with its cost to the
        observer."""
        self.last_step_s = time.monotonic()
        if receiver is self._replies.receiver:
            self._pending_s.popleft()
            receiver.deliver(result)
        cost = self.started.result().cost_model.cost_of(inputs)
        self._observer.observe_step(result, inputs.num_tokens, cost)
