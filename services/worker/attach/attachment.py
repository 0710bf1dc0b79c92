"""One attachment to a scheduler: hello and welcome, then plans in and results out until either side ends it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol

from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.result import StepResult
from quire.shared import columns
from quire.shared.errors import FailedPrecondition, Internal, QuireError, Unavailable, to_proto
from quire.shared.kv import block_hash
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process import lifecycle
from quire.shared.process.lifecycle import Shutdown
from quire.shared.process.supervision import Tasks
from quire.shared.rpc import worker_hello
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import CallStream, PartStream

log = logger("worker.attachment")

FIRST_INTERVAL_S = 1.0  # heartbeat interval before the welcome sets one

SchedulerSession = Duplex[pb.AttachResponse, pb.AttachRequest]
FetchWeights = Callable[[pb.StageWeights], Awaitable[None]]
OnWelcome = Callable[[pb.SchedulerWelcome], Awaitable[None]]


class Executor(Protocol):
    """Executes the plans of an attachment: the engine of a device, or a simulation. Methods queue work and return at
    once; results, replies and errors arrive as calls of `receiver` on the event loop."""

    async def start_epoch(self, receiver: Attachment) -> RetainedState:
        """Ends the previous attachment and starts that of `receiver`; returns the state that the worker retained."""

    def submit(self, receiver: Attachment, plan: StepPlan) -> None: ...

    def reset_cache(self) -> None: ...

    def prepare_grammar(self, receiver: Attachment, order: pb.PrepareGrammar) -> None: ...

    def release_grammar(self, grammar_id: bytes) -> None: ...

    def prepare_media(self, receiver: Attachment, order: pb.PrepareMedia) -> None: ...

    def release_media(self, identifier: bytes) -> None: ...

    def transfer(self, receiver: Attachment, order: pb.Transfer) -> None: ...

    def disk_transfer(self, receiver: Attachment, order: pb.DiskTransfer) -> None: ...

    def fetch_blocks(self, receiver: Attachment, order: pb.FetchBlocks) -> None: ...

    def load_adapter(self, receiver: Attachment, order: pb.LoadAdapter) -> None: ...

    def unload_adapter(self, order: pb.UnloadAdapter) -> None: ...

    def device_order(self, receiver: Attachment, order: pb.DeviceOrder) -> None: ...


class BrokenSession(Exception):
    """Ends an attachment after a protocol violation or a failed step; the worker attaches again."""


class Redirected(Exception):
    """Raised when the scheduler directs this worker to another one; the message is its address."""


class Attachment:
    """One attachment: sends plans to the engine and the engine's results to the scheduler."""

    def __init__(
        self,
        stream: CallStream,
        engine: Executor,
        shutdown: Shutdown,
        drain_timeout_s: float,
        fetch_weights: FetchWeights,
    ) -> None:
        """Prepares an attachment on a call after its handshake; run() starts it. `drain_timeout_s`: how long after
        SIGTERM the scheduler may take to migrate its sequences; `fetch_weights`: downloads weights that the scheduler
        streams and sets their location in the order; raises QuireError."""
        self._fetch_weights = fetch_weights
        self._tasks = Tasks()
        heartbeat = pb.AttachRequest(heartbeat=pb.Heartbeat())
        self._session: SchedulerSession = Duplex(PartStream(stream), heartbeat, FIRST_INTERVAL_S)
        self._engine = engine
        self._shutdown = shutdown
        self._drain_timeout_s = drain_timeout_s
        self._broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._next_step_id = 1
        self._num_weight_drops = 0
        self.epoch = 0  # 0: no welcome received yet
        self.num_results = 0

    async def run(self, hello: pb.WorkerHello, welcomed: OnWelcome) -> None:
        """Starts a new epoch of the engine, sends `hello` completed with the retained blocks, adapters and weights,
        then serves the session; `welcomed` is awaited with the scheduler's welcome. Returns when a drain has finished
        or timed out; raises BrokenSession, Redirected, Unavailable or gRPC errors."""
        started = self._tasks.start("the start of the epoch", self._engine.start_epoch(self))
        await lifecycle.run_until_first(started, self._shutdown.wait())  # a hanging device never starts an epoch
        if self._shutdown.requested:
            return
        retained = started.result()
        hello.held.block_ids, hello.held.block_hashes = columns.u32_bytes(retained.block_ids), retained.hashes
        hello.held.block_groups = columns.u32_bytes(retained.groups) if any(retained.groups) else b""
        hello.held.host_place_ids = columns.u32_bytes(list(retained.in_host_memory))
        hello.held.host_place_hashes, hello.held.host_place_groups = block_hash.join_names(
            retained.in_host_memory.values()
        )
        hello.held.disk_place_ids = columns.u32_bytes(list(retained.on_disk))
        hello.held.disk_place_hashes, hello.held.disk_place_groups = block_hash.join_names(retained.on_disk.values())
        hello.lora.names.extend(adapter.name for adapter, _ in retained.adapters)
        hello.lora.digests = b"".join(adapter.digest for adapter, _ in retained.adapters)
        hello.lora.paths.extend(path for _, path in retained.adapters)
        if retained.weights is not None:
            weights = retained.weights
            identity = model_pb2.WeightsIdentity(
                update=weights.update,
                version=weights.version,
                path=weights.path,
                encoder_update=weights.encoder_update,
            )
            hello.weights_state.weights.CopyFrom(identity)
        hello.weights_state.asleep.extend(retained.asleep)
        hello.weights_state.sleep_level = retained.sleep_level
        worker_hello.add_ungrouped(hello)
        self._session.send(pb.AttachRequest(hello=hello))
        try:
            await lifecycle.run_until_first(self._wait_for_break(), self._run_session(welcomed), self._session.pump())
        finally:
            await self._tasks.close()

    def deliver(self, result: StepResult) -> None:
        """Engine callback: sends the result of a finished step to the scheduler and counts it."""
        self.num_results += 1
        self._session.send(pb.AttachRequest(result=encode_result(result)))

    def grammar_prepared(self, prepared: pb.GrammarPrepared) -> None:
        """Engine callback: reports a compiled grammar or its error."""
        self._session.send(pb.AttachRequest(grammar_prepared=prepared))

    def media_prepared(self, prepared: pb.MediaPrepared) -> None:
        """Engine callback: reports an encoded media item or its error."""
        self._session.send(pb.AttachRequest(media_prepared=prepared))

    def blocks_transferred(self, done: pb.Transferred) -> None:
        """Engine callback: reports a finished or failed block transfer."""
        self._session.send(pb.AttachRequest(transferred=done))

    def blocks_fetched(self, done: pb.BlocksFetched) -> None:
        """Engine callback: reports a finished or failed fetch from another worker."""
        self._session.send(pb.AttachRequest(fetched=done))

    def adapter_loaded(self, loaded: pb.AdapterLoaded) -> None:
        """Engine callback: reports a loaded adapter or its error."""
        self._session.send(pb.AttachRequest(adapter_loaded=loaded))

    def device_order_done(self, done: pb.DeviceOrderDone) -> None:
        """Engine callback: reports an executed device order or its error."""
        self._session.send(pb.AttachRequest(device_order_done=done))

    def abort_session(self, reason: str) -> None:
        """Engine callback: ends the attachment with BrokenSession(reason), as no further result will follow; only the
        first call counts."""
        if not self._broken.done():
            self._broken.set_exception(BrokenSession(reason))

    async def _wait_for_break(self) -> None:
        """Waits without end for abort_session() and raises its BrokenSession."""
        await self._broken

    async def _run_session(self, welcomed: OnWelcome) -> None:
        """Receives the welcome, adopts its epoch and heartbeat interval, awaits `welcomed`, then reads messages until
        the stream ends or a drain has finished. Raises Redirected for a redirect and BrokenSession for any other first
        message."""
        kind = "heartbeat"  # heartbeats precede the welcome
        while kind == "heartbeat":
            message = await self._session.receive()
            kind = message.WhichOneof("message")
        if kind == "redirect":
            raise Redirected(message.redirect.address)
        if kind != "welcome":
            raise BrokenSession(f"the scheduler opened with {kind}, not with welcome")
        self.epoch = message.welcome.epoch
        self._session.set_heartbeat_interval(message.welcome.heartbeat_interval_ms / 1000)
        await welcomed(message.welcome)
        await lifecycle.run_until_first(self._read_messages(), self._drain())

    async def _read_messages(self) -> None:
        """Passes each message of the scheduler to the engine. Raises Redirected, BrokenSession for a second welcome,
        and Unavailable when the stream closes without a requested shutdown."""
        async for message in self._session.messages():
            match message.WhichOneof("message"):
                case "plan":
                    self.submit_plan(message.plan)
                case "prepare_grammar" | "release_grammar" | "prepare_media" | "release_media":
                    self._dispatch_preparation(message)
                case "transfer" | "disk_transfer" | "fetch_blocks":
                    self._dispatch_transfer(message)
                case "load_adapter":
                    self._engine.load_adapter(self, message.load_adapter)
                case "unload_adapter":
                    self._engine.unload_adapter(message.unload_adapter)
                case "device_order":
                    self._dispatch_order(message.device_order)
                case "cache_reset":
                    self._engine.reset_cache()
                case "redirect":
                    raise Redirected(message.redirect.address)
                case "welcome":
                    raise BrokenSession("the scheduler sent a second welcome")
        if not self._shutdown.requested:
            raise Unavailable("the scheduler closed the session")

    def _dispatch_preparation(self, message: pb.AttachResponse) -> None:
        """Submits an order to prepare or release a grammar or a media item to the engine."""
        match message.WhichOneof("message"):
            case "prepare_grammar":
                self._engine.prepare_grammar(self, message.prepare_grammar)
            case "release_grammar":
                self._engine.release_grammar(message.release_grammar.grammar_id)
            case "prepare_media":
                self._engine.prepare_media(self, message.prepare_media)
            case "release_media":
                self._engine.release_media(message.release_media.identifier)

    def _dispatch_transfer(self, message: pb.AttachResponse) -> None:
        """Submits a transfer to or from host memory, disk or another worker to the engine."""
        match message.WhichOneof("message"):
            case "transfer":
                self._engine.transfer(self, message.transfer)
            case "disk_transfer":
                self._engine.disk_transfer(self, message.disk_transfer)
            case "fetch_blocks":
                self._engine.fetch_blocks(self, message.fetch_blocks)

    def _dispatch_order(self, order: pb.DeviceOrder) -> None:
        """Submits a device order to the engine; an order to stage streamed weights is submitted only when a background
        task has downloaded them. Clears the fields that only this worker sets, and counts weight drops."""
        if not order.HasField("stage_weights"):
            self._num_weight_drops += order.HasField("drop_weights")
            self._engine.device_order(self, order)
            return
        order.stage_weights.spooled = ""
        order.stage_weights.ClearField("broadcast")
        if order.stage_weights.stream_id:
            self._tasks.start("the fetch of weights", self._fetch_and_stage(order, self._num_weight_drops))
        else:
            self._engine.device_order(self, order)

    async def _fetch_and_stage(self, order: pb.DeviceOrder, num_drops: int) -> None:
        """Downloads streamed weights, then submits the order that stages them. `num_drops`: weight drops received
        before the order. An error, or a weight drop meanwhile, is answered with DeviceOrderDone and submits nothing."""
        try:
            await self._fetch_weights(order.stage_weights)
            if self._num_weight_drops > num_drops:  # staging now would keep them, on a GPU in place of the KV cache
                raise FailedPrecondition("the weights were dropped while they were being downloaded")
        except QuireError as error:
            self.device_order_done(pb.DeviceOrderDone(order_id=order.order_id, error=to_proto(error)))
        except Exception:  # an unanswered order would block all later ones
            log.exception("cannot fetch weights")
            failed = to_proto(Internal("cannot fetch weights"))
            self.device_order_done(pb.DeviceOrderDone(order_id=order.order_id, error=failed))
        else:
            self._engine.device_order(self, order)

    def submit_plan(self, plan: pb.StepPlan) -> None:
        """Checks the epoch and the consecutive step id of a plan, decodes it and submits it to the engine. Raises
        BrokenSession for a wrong epoch or id and for invalid columns."""
        if plan.epoch != self.epoch:
            raise BrokenSession(f"received a plan of epoch {plan.epoch} in epoch {self.epoch}")
        if plan.step_id != self._next_step_id:
            raise BrokenSession(f"received step {plan.step_id}, expected step {self._next_step_id}")
        self._next_step_id += 1
        try:
            decoded = decode_plan(plan)
        except columns.ColumnError as error:
            raise BrokenSession(f"step {plan.step_id} breaks the session: {error}") from None
        self._engine.submit(self, decoded)

    async def _drain(self) -> None:
        """Announces after SIGTERM that the worker leaves; steps continue until the scheduler has migrated every
        sequence and closes the stream. Returns, with a warning, if that takes longer than the drain timeout."""
        await self._shutdown.wait()
        log.info("leaving", epoch=self.epoch)
        self._session.send(pb.AttachRequest(leaving=pb.Leaving()))
        await asyncio.sleep(self._drain_timeout_s)
        log.warning("the scheduler did not finish the drain in time", seconds=self._drain_timeout_s)
