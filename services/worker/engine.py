"""The device has a thread of its own: plans go in through a queue, results come out on the event loop.

On CUDA a step is launched before the one before it has ended; a second thread sleeps until the device has passed a
step's end and hands its tokens on, so that the first is free to launch the next. On the CPU a launch is the whole step.
Both threads sleep when there is nothing to do.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import torch
from google.protobuf.message import DecodeError

from services.worker.device.device import is_broken
from services.worker.device_work import (
    AddAdapter,
    Arrived,
    BegunMove,
    Command,
    DeviceWork,
    Execute,
    FinishedStep,
    ForgetCache,
    LaunchedStep,
    MoveBlocks,
    Operate,
    Receiver,
    ReleaseGrammar,
    RemoveAdapter,
    Rest,
    ShareGrammar,
)
from services.worker.kv.held_blocks import HeldReport
from services.worker.kv_transfer.fetcher import Fetcher
from services.worker.kv_transfer.orders import BegunPages, PageOrder
from services.worker.lora.folders import AdapterFolders
from services.worker.lora.peft_folder import PeftFolder
from services.worker.lora.reader import AdapterReader
from services.worker.ranks.group import OneRank, RankFailure, RankGroup
from services.worker.replica import Occupancy, Replica
from services.worker.replies import Replies, set_exception
from services.worker.runner.expert_load import LoadByLayer
from services.worker.step.plan_violation import PlanViolation
from services.worker.step.step_inputs import StepInputs
from services.worker.structured.background import Background
from services.worker.structured.compile_pool import CompilePool, Prepared
from shared import columns
from shared.adapter_contents import AdapterId
from shared.errors import FailedPrecondition, Internal, InvalidArgument, QuireError, to_proto
from shared.logs import logger
from shared.metrics.worker import NO_COST, StepCost
from shared.pb.common.v1 import sampling_pb2
from shared.pb.worker.v1 import worker_pb2 as pb

log = logger("worker.engine")

IDLE_AFTER_S = 0.05
MOST_STUCK_LOOKS = 240  # of check_ranks() at one command: two minutes, as worker/service.py calls it
PUBLISH_EVERY_S = 0.25  # counting used blocks costs up to a millisecond: not after every step


class StepObserver(Protocol):
    """Is told of every step, on the event loop."""

    def step_done(self, result: pb.StepResult, num_tokens: int, cost: StepCost) -> None: ...

    def grammar_prepared(self, prepared: Prepared) -> None: ...


class Engine:
    """Built and used on the event loop; everything with `_on_device` in its name runs on the device's thread."""

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
        """`build` makes rank 0's part of the replica, on the device's thread; `synchronous`: its launches return when
        they are done; `ranks`: None for a replica of one; `adapters`: None: it takes none while it
        runs; `staged`: other ranks have other layers."""
        self._adapters = adapters or AdapterReader(AdapterFolders((), 1))
        self._grammars = grammars
        self._build = build
        self._observer = observer
        self._synchronous = synchronous
        self._ranks: RankGroup = ranks or OneRank()
        self._loop = asyncio.get_running_loop()
        self._replies = Replies(self._loop)
        self._inbox: queue.SimpleQueue[Command | None] = queue.SimpleQueue()  # None: stop
        self._launched: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()  # None: stop
        self._sent: queue.SimpleQueue[LaunchedStep | None] = queue.SimpleQueue()  # to other stages; None: stop
        self._moves: queue.SimpleQueue[BegunMove | BegunPages | None] = queue.SimpleQueue()  # None: stop
        self.fetcher: Fetcher | None = None  # None: no blocks come from other workers
        self._broken: Receiver | None = None  # its later plans are skipped
        self._work: DeviceWork | None = None  # once the replica is built
        self._num_begun = self._num_obeyed = 0  # commands
        self._stuck_looks, self._seen_done = 0, object()
        self._stager: Background | None = None  # once weights are to be staged beside steps
        self._dirty = True
        self._published_s = 0.0
        self._threads = [threading.Thread(target=self._run_on_device, name="device", daemon=True)]
        if not synchronous:
            self._threads.append(threading.Thread(target=self._run_waiting, name="waiting", daemon=True))
            self._threads.append(threading.Thread(target=self._run_moving, name="moving", daemon=True))
        if staged:
            self._threads.append(threading.Thread(target=self._run_arrivals, name="arrivals", daemon=True))
        # The replica, for its facts: only the device's thread may call its methods.
        self.started: asyncio.Future[Replica] = self._loop.create_future()
        self.died: asyncio.Future[None] = self._loop.create_future()
        self.occupancy = Occupancy(0, 0, 0)
        self.expert_load: LoadByLayer = {}
        self.last_step_s: float | None = None  # time.monotonic() when a step last ended
        self._pending_s: deque[float] = deque()  # when the plans without a result came
        for thread in self._threads:
            thread.start()

    @property
    def oldest_pending_s(self) -> float:
        """How long the oldest plan without a result has been here; 0 if there is none. Any thread may ask."""
        try:
            return time.monotonic() - self._pending_s[0]
        except IndexError:
            return 0.0

    def progress(self) -> dict[str, object]:
        """What the device's thread has got done, if it has something to do."""
        if self._work is not None and self._work.operates:
            return {}
        in_flight = self._work is not None and self._work.num_in_flight > 0
        has_work = self._num_begun > self._num_obeyed or in_flight or not self._inbox.empty()
        return {"device": self._num_obeyed} if has_work else {}

    async def rest(self, receiver: Receiver) -> HeldReport:
        """Ends the attachment before and begins that of `receiver`; returns what the blocks hold."""
        self._replies.receiver = receiver
        self._pending_s.clear()
        reply: asyncio.Future[HeldReport] = self._loop.create_future()
        self._inbox.put(Rest(reply))
        return await reply

    def submit(self, receiver: Receiver, plan: pb.StepPlan) -> None:
        self._pending_s.append(time.monotonic())
        self._inbox.put(Execute(receiver, plan, time.perf_counter_ns()))

    def transfer(self, receiver: Receiver, order: pb.Transfer) -> None:
        """After the plans that are here."""
        self._inbox.put(MoveBlocks(receiver, order))

    def disk_transfer(self, receiver: Receiver, order: pb.DiskTransfer) -> None:
        """Beside the steps and all other moves."""

        def answer(lost: list[int], took_us: int) -> None:
            column = columns.u32_bytes(lost)
            done = pb.Transferred(transfer_id=order.transfer_id, transfer_us=took_us, lost_blocks=column)
            self._replies.moved(receiver, done)

        try:
            self.started.result().move_on_disk(order, answer)
        except PlanViolation as violation:
            receiver.break_off(f"disk transfer {order.transfer_id} breaks the session: {violation}")

    def fetch_blocks(self, receiver: Receiver, order: pb.FetchBlocks) -> None:
        """Beside the steps."""
        if self.fetcher is None:
            receiver.break_off("this worker reads nobody's blocks, and said so")
        else:
            self.fetcher.fetch(receiver, order)

    @property
    def receiver(self) -> Receiver | None:
        """The attachment that lasts."""
        return self._replies.receiver

    async def ask(self, make: Callable[[asyncio.Future[Any]], PageOrder]) -> Any:
        """The reply to an order about pages. Raises what it met."""
        reply: asyncio.Future[Any] = self._loop.create_future()
        self._inbox.put(make(reply))
        return await reply

    def forget_cache(self) -> None:
        self._inbox.put(ForgetCache())

    def prepare_grammar(self, receiver: Receiver, order: pb.PrepareGrammar) -> None:
        """At once, beside the steps."""
        grammar_id = order.grammar_id

        def done(prepared: Prepared) -> None:
            self._replies.post(self._observer.grammar_prepared, prepared)
            self._replies.grammar_prepared(receiver, grammar_id, prepared)

        try:
            constraint = sampling_pb2.StructuredOutput.FromString(order.grammar)
        except DecodeError:  # schedulers do not look at it
            done(Prepared(InvalidArgument("grammar: not a serialized StructuredOutput", field="grammar"), 0))
        else:
            self._inbox.put(ShareGrammar(order))
            self._grammars.prepare(grammar_id, constraint, done)

    def release_grammar(self, grammar_id: bytes) -> None:
        """After the plans that are here, which may name it."""
        self._inbox.put(ReleaseGrammar(grammar_id))

    def load_adapter(self, receiver: Receiver, order: pb.LoadAdapter) -> None:
        """Read beside the steps, then put between two of them."""
        if not self._max_adapters:
            error = FailedPrecondition("lora_folders: this worker was started with none: it loads no adapters")
            receiver.adapter_loaded(pb.AdapterLoaded(order_id=order.order_id, error=to_proto(error)))
            return

        def done(found: tuple[PeftFolder, bytes] | QuireError) -> None:
            if isinstance(found, QuireError):
                self._replies.adapter_not_loaded(receiver, order.order_id, found)
            else:
                self._inbox.put(AddAdapter(receiver, order.order_id, *found))

        self._adapters.read(order.name, order.path, order.digest, done)

    def device_order(self, receiver: Receiver, order: pb.DeviceOrder) -> None:
        """After the plans that are here; weights may be staged beside them."""
        replica = self.started.result()
        if order.WhichOneof("order") != "stage_weights" or not replica.stages_beside_steps:
            self._inbox.put(Operate(receiver, order))
            return

        def stage() -> None:
            error: Exception | None = None
            try:
                with torch.inference_mode():
                    replica.stage_weights(order.stage_weights)
            except Exception as raised:
                error = raised
            if not self.takes(receiver):
                replica.drop_weights()
            self._replies.order_done(receiver, order, error)

        if self._stager is None:
            self._stager = Background("weights", begin=lambda: torch.set_num_threads(1))
        self._stager.submit(stage)

    @property
    def _max_adapters(self) -> int:
        adapters = self.started.result().adapters
        return adapters.max_adapters if adapters is not None else 0

    def unload_adapter(self, order: pb.UnloadAdapter) -> None:
        """After the plans that are here, which may name it."""
        self._inbox.put(RemoveAdapter(AdapterId(order.name, order.digest)))

    def check_ranks(self) -> None:
        """Ends the engine if a rank of the replica is gone or hangs, and with it the other ranks. Waits for nothing."""
        try:
            self._ranks.check()
            self._check_progress()
        except RankFailure as failure:
            self._ranks.stop(0.0)  # whoever waits for one of them in a collective hears of it
            set_exception(self.died, failure)

    def _check_progress(self) -> None:
        """A collective that some ranks are not in waits for ever."""
        done = self.progress().get("device") if self._ranks.size > 1 else None
        self._stuck_looks = self._stuck_looks + 1 if done is not None and done == self._seen_done else 0
        self._seen_done = done
        if self._stuck_looks > MOST_STUCK_LOOKS:
            raise RankFailure("the ranks are stuck in a step")

    async def stop(self, timeout_s: float) -> bool:
        """Lets the threads finish what they are at; whether they did in time."""
        self._inbox.put(None)
        self._launched.put(None)
        self._sent.put(None)
        self._moves.put(None)
        deadline = self._loop.time() + timeout_s
        for thread in self._threads:
            await asyncio.to_thread(thread.join, max(0.0, deadline - self._loop.time()))
        await asyncio.to_thread(self._ranks.stop, max(0.0, deadline - self._loop.time()))
        return not any(thread.is_alive() for thread in self._threads)

    # On the device's thread

    def _run_on_device(self) -> None:
        with torch.inference_mode():
            try:
                replica = self._build()
                self._ranks.start()
            except Exception as error:
                self._replies.fail(self.started, error)
                return
            self._work = DeviceWork(replica, self._ranks, self._grammars, self)
            self._replies.resolve(self.started, replica)
            try:
                while (command := self._next_on_device(replica)) is not None:
                    self._num_begun += 1
                    self._dirty = True
                    self._work.obey(command)
                    self._num_obeyed += 1
            except Exception as error:
                log.exception("the engine failed")
                self._replies.fail(self.died, error)

    def _next_on_device(self, replica: Replica) -> Command | None:
        if self._dirty and time.monotonic() - self._published_s > PUBLISH_EVERY_S:
            self._publish_on_device(replica)
        if self._dirty:
            try:
                return self._inbox.get(timeout=IDLE_AFTER_S)
            except queue.Empty:
                self._publish_on_device(replica)
        return self._inbox.get()

    def _publish_on_device(self, replica: Replica) -> None:
        self.occupancy = replica.occupancy()
        self.expert_load = replica.expert_load()
        self._published_s = time.monotonic()
        self._dirty = False

    # Outlet of DeviceWork, on the device's thread

    def takes(self, receiver: Receiver) -> bool:
        return receiver is self._replies.receiver and receiver is not self._broken

    def launched(self, step: LaunchedStep) -> FinishedStep | None:
        if self._synchronous:
            return self._finish(step)
        self._launched.put(step)
        return None

    def pending(self, step: LaunchedStep) -> None:
        self._sent.put(step)

    def rested(self, reply: asyncio.Future[HeldReport], report: HeldReport) -> None:
        self._replies.resolve(reply, report)

    def moving(self, move: BegunMove) -> None:
        if self._synchronous:
            self._finish_move(move)
        else:
            self._moves.put(move)

    def paging(self, begun: BegunPages) -> None:
        if self._synchronous:
            self._finish_move(begun)
        else:
            self._moves.put(begun)

    def not_paged(self, order: PageOrder, error: Exception) -> None:
        if is_broken(error):
            raise error
        self._replies.fail(order.reply, error)

    def not_moved(self, receiver: Receiver, transfer_id: int, error: Exception) -> None:
        if is_broken(error):
            raise error
        self._replies.not_moved(receiver, transfer_id, error)

    def adapter_added(self, command: AddAdapter, error: Exception | None) -> None:
        if error is not None and is_broken(error):
            raise error
        name = command.folder.name
        if error is None:
            log.info("adapter loaded", adapter=name, digest=command.digest.hex()[:16])
            self._replies.adapter_loaded(command.receiver, command.order_id, command.digest)
        else:
            log.warning("an adapter cannot be loaded", adapter=name, error=f"{type(error).__name__}: {error}")
            self._replies.adapter_not_loaded(command.receiver, command.order_id, error)

    def operated(self, command: Operate, error: Exception | None) -> None:
        if error is not None and is_broken(error):
            raise error
        self._replies.order_done(command.receiver, command.order, error)

    # On the waiting thread and the moving one (on the device's, if that is synchronous)

    def _run_moving(self) -> None:
        try:
            while (move := self._moves.get()) is not None:
                self._finish_move(move)
        except Exception as error:  # of the device: steps will meet it as well
            log.exception("the thread that waits for blocks failed")
            self._replies.fail(self.died, error)

    def _finish_move(self, move: BegunMove | BegunPages) -> None:
        move.moving.wait()
        if isinstance(move, BegunPages):
            self._replies.resolve(move.order.reply, move.content)
            return
        took_us = (time.perf_counter_ns() - move.begun_ns) // 1000
        done = pb.Transferred(transfer_id=move.transfer_id, transfer_us=took_us)
        self._replies.moved(move.receiver, done)

    def _run_arrivals(self) -> None:
        try:
            while (step := self._sent.get()) is not None:
                step.flight.launch.await_arrival()
                self._inbox.put(Arrived(step))
        except Exception as error:
            log.exception("the thread that waits for other stages failed")
            self._replies.fail(self.died, error)

    def _run_waiting(self) -> None:
        try:
            while (step := self._launched.get()) is not None:
                self._inbox.put(self._finish(step))
        except Exception as error:
            log.exception("the thread that waits for steps failed")
            self._replies.fail(self.died, error)

    def _finish(self, step: LaunchedStep) -> FinishedStep:
        flight = step.flight
        try:
            output = flight.launch.wait()
            self._ranks.collect(step.ticket, flight.inputs)
            result = flight.result(output, step.wait_us)
        except Exception as error:
            self.failed(step.receiver, flight.step_id, error)
            return FinishedStep(step, None)
        self._replies.post(self._deliver, step.receiver, result, flight.inputs)
        return FinishedStep(step, output)

    # On either thread, to the loop

    def broke(self, receiver: Receiver, reason: str) -> None:
        self._broken = receiver
        self._replies.post(receiver.break_off, reason)

    def failed(self, receiver: Receiver, step_id: int, error: Exception) -> None:
        log.exception("step failed", step=step_id)
        self.broke(receiver, f"step {step_id} failed: {type(error).__name__}: {error}")
        if is_broken(error):
            self._replies.fail(self.died, Internal(f"the device is broken: {error}"))
        elif isinstance(error, RankFailure):
            self._replies.fail(self.died, error)

    def _deliver(self, receiver: Receiver, result: pb.StepResult, inputs: StepInputs) -> None:
        self.last_step_s = time.monotonic()
        if receiver is self._replies.receiver:
            self._pending_s.popleft()
            receiver.deliver(result)
        cost = self.started.result().cost_model
        self._observer.step_done(result, inputs.num_tokens, cost.of(inputs) if cost else NO_COST)
