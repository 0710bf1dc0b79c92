"""A reference worker and a simple frontend, each at the far end of a real gRPC session."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from dataclasses import dataclass, field

import grpc.aio
from google.protobuf.message import Message

from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import Admission, BeamMove, StepPlan, StepResult
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.values.payload import Payload
from quire.shared import columns
from quire.shared.errors import InvalidArgument, to_proto
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1 import finish_pb2, model_pb2
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.pb.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.shared.pb.worker.v1 import worker_pb2, worker_pb2_grpc
from quire.shared.process import lifecycle
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.trust import Dialler
from tests.services.scheduler.reference_worker import EOS, VOCAB, ReferenceWorker

# Longer than any test: a heartbeat that meets the end of a call makes gRPC forget why it has ended.
HEARTBEAT_S = 60.0
HEARTBEATS = {"heartbeat_interval_ms": int(1000 * HEARTBEAT_S)}  # a scheduler's settings
WORKERS, FRONTENDS = "quire.worker.v1.WorkerService", "quire.scheduler.v1.SchedulerService"
MODEL = model_pb2.ModelIdentity(name="paper", fingerprint="00", vocab_size=VOCAB)


def layout(block_size: int = 4) -> model_pb2.BlockLayout:
    return model_pb2.BlockLayout(block_size=block_size, hash_scheme=block_hash.SCHEME)


@dataclass
class WorkerPeer:
    """Attaches, executes plans as they come, and can be made to hang or to leave."""

    address: str
    limits: CoreLimits
    id: str = "w0"
    hello: worker_pb2.WorkerHello = field(default_factory=worker_pb2.WorkerHello)
    epoch: int = 0
    heartbeat_s: float = HEARTBEAT_S
    num_heartbeats: int = 0  # that came
    hold: asyncio.Event | None = None  # results wait for it
    results_left: int = -1  # until it is cleared; below 0: it is not
    reads_on: bool = False  # other orders are seen while results wait
    num_results: int = 0  # sent
    answering: list[asyncio.Future[None]] = field(default_factory=list)
    wrong: bool = False  # its next result ends the session; gRPC forgets why a call has ended if a write meets the end,
    falls_silent: bool = False  # so it sends no more
    step_s: float = 0.0
    poison: int | None = None  # a sequence that begins with this token ends the connection
    attached: asyncio.Event = field(default_factory=asyncio.Event)
    num_resets: int = 0
    digests: dict[str, bytes] = field(default_factory=dict)  # of the adapters that it finds, by path
    hold_loads: asyncio.Event | None = None  # answers to orders for adapters wait for it
    ordered: list[str] = field(default_factory=list)  # adapters loaded and unloaded
    digests_asked: list[bytes] = field(default_factory=list)
    has_weights: model_pb2.WeightsIdentity = field(default_factory=lambda: model_pb2.WeightsIdentity(version="0"))
    staged: model_pb2.WeightsIdentity | None = None
    asleep: list[str] = field(default_factory=list)
    sleep_level: int = 0
    refuses: set[str] = field(default_factory=set)  # kinds of device orders
    hold_orders: dict[str, asyncio.Event] = field(default_factory=dict)  # answers to a kind of them wait for it
    fetched: list[WeightsPiece] = field(default_factory=list)
    operated: list[str] = field(default_factory=list)  # device orders, by kind
    stages_beside_steps: bool = True
    joins: list[worker_pb2.JoinWeightsGroup] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)  # of trainers that it is in
    dialler: Dialler = field(default_factory=Dialler)

    async def run(self) -> None:
        """Serves until the scheduler closes the session."""
        self.paper = ReferenceWorker(self.limits)
        async with self.dialler.connect(self.address) as channel:
            self.call = worker_pb2_grpc.WorkerServiceStub(channel).Attach()
            await self.dialler.handshake(self.call, worker_pb2.AttachRequest, WORKERS, self.address, known=True)
            self.link = Duplex(
                PartStream(self.call), worker_pb2.AttachRequest(heartbeat=worker_pb2.Heartbeat()), self.heartbeat_s
            )
            self.link.send(worker_pb2.AttachRequest(hello=self._hello()))
            await lifecycle.run_until_first(self.link.pump(), self._read())

    def stand_still_after(self, count: int) -> None:
        """Sends `count` more results; the others wait until go_on() is called."""
        self.hold, self.results_left = asyncio.Event(), count
        self.hold.set()

    def go_on(self) -> None:
        assert self.hold is not None
        self.results_left = -1
        self.hold.set()

    async def leave(self) -> None:
        self.link.send(worker_pb2.AttachRequest(leaving=worker_pb2.Leaving()))

    async def _read(self) -> None:
        async for message in self.link.messages():
            await self.take(message)

    async def take(self, message: worker_pb2.AttachResponse) -> None:
        kind = message.WhichOneof("message")
        if kind == "welcome":
            self.epoch = message.welcome.epoch
            self.attached.set()
        elif kind == "heartbeat":
            self.num_heartbeats += 1
        elif kind == "cache_reset":
            self.num_resets += 1
        elif kind == "load_adapter":
            self.ordered.append(f"load {message.load_adapter.name}")
            self.digests_asked.append(message.load_adapter.digest)
            self.loading = asyncio.ensure_future(self._load(message.load_adapter))
        elif kind == "unload_adapter":
            self.ordered.append(f"unload {message.unload_adapter.name}")
        elif kind == "device_order":
            self.operating = asyncio.ensure_future(self._operate(message.device_order))
        elif kind == "plan":
            if any(columns.i32(admission.token_ids)[0] == self.poison for admission in message.plan.admitted):
                self.call.cancel()
                return
            result = self.paper.execute(_plan(message.plan, self.paper))
            if self.reads_on:
                self.answering.append(asyncio.ensure_future(self._answer(result)))
            else:
                await self._answer(result)

    async def _answer(self, result: StepResult) -> None:
        if self.hold is not None:
            if self.results_left == 0:
                self.hold.clear()
            self.results_left -= 1
            await self.hold.wait()
        await asyncio.sleep(self.step_s)
        if not self.falls_silent:
            self.link.send(worker_pb2.AttachRequest(result=self.result(result)))
            self.num_results += 1
        self.falls_silent = self.falls_silent or self.wrong

    async def _load(self, order: worker_pb2.LoadAdapter) -> None:
        if self.hold_loads is not None:
            await self.hold_loads.wait()
        loaded = worker_pb2.AdapterLoaded(order_id=order.order_id, digest=self.digests.get(order.path, b""))
        if not loaded.digest:
            loaded.error.CopyFrom(to_proto(InvalidArgument(f"there is no {order.path}")))
        self.link.send(worker_pb2.AttachRequest(adapter_loaded=loaded))

    async def _operate(self, order: worker_pb2.DeviceOrder) -> None:
        kind = order.WhichOneof("order")
        self.operated.append(kind)
        if kind in self.hold_orders:
            await self.hold_orders[kind].wait()
        done = worker_pb2.DeviceOrderDone(order_id=order.order_id)
        if kind in self.refuses:
            done.error.CopyFrom(to_proto(InvalidArgument(f"cannot {kind}")))
        elif (
            kind == "stage_weights" and order.stage_weights.stream_id and not await self._has_come(order.stage_weights)
        ):
            done.error.CopyFrom(to_proto(InvalidArgument("the stream broke off")))
        elif kind == "stage_weights":
            self.staged = order.stage_weights.weights
        elif kind == "swap_weights":
            assert self.staged is not None
            assert self.staged.update == order.swap_weights.update
            self.has_weights, self.staged = self.staged, None
        elif kind == "drop_weights":
            self.staged = None
        elif kind == "join_weights_group":
            self.joins.append(order.join_weights_group)
            self.groups.add(order.join_weights_group.group_name)
        elif kind == "leave_weights_group":
            self.groups.discard(order.leave_weights_group.group_name)
        elif kind == "sleep":
            self.asleep, self.sleep_level = ["kv_cache", "weights"], order.sleep.level
        elif kind == "wake_up":
            self.asleep = [tag for tag in self.asleep if tag not in (order.wake_up.tags or self.asleep)]
        self.link.send(worker_pb2.AttachRequest(device_order_done=done))

    async def _has_come(self, order: worker_pb2.StageWeights) -> bool:
        """Waits for a stream; returns False if it is closed before it can be opened."""
        try:
            return not order.stream_id or await self.fetch(order)
        except grpc.aio.AioRpcError:
            return False

    async def fetch(self, order: worker_pb2.StageWeights, worker_id: str = "") -> bool:
        """Fetches a stream of weights; returns whether all of it arrived."""
        async with self.dialler.connect(self.address) as channel:
            call = worker_pb2_grpc.WorkerServiceStub(channel).FetchWeights()
            await self.dialler.handshake(call, worker_pb2.FetchWeightsRequest, WORKERS, self.address, known=True)
            fetch = worker_pb2.FetchWeights(worker_id=worker_id or self.id, stream_id=order.stream_id)
            await call.write(worker_pb2.FetchWeightsRequest(fetch=fetch))
            while isinstance(message := await call.read(), worker_pb2.FetchWeightsResponse):
                self.fetched.append(message.piece)
            return bool(self.fetched) and self.fetched[-1].HasField("end")

    def result(self, result: StepResult) -> worker_pb2.StepResult:
        wire = worker_pb2.StepResult(
            epoch=self.epoch, step_id=result.step_id, token_ids=columns.i32_bytes(result.token_ids)
        )
        if (prompts := result.prompts) is not None:
            wire.prompt_logprobs.slots = prompts.slots.tobytes()
            wire.prompt_logprobs.position_counts = prompts.position_counts.tobytes()
            wire.prompt_logprobs.entries.entry_counts = prompts.entries.entry_counts.tobytes()
            wire.prompt_logprobs.entries.token_ids = prompts.entries.token_ids.tobytes()
            wire.prompt_logprobs.entries.logprobs = prompts.entries.logprobs.tobytes()
            wire.prompt_logprobs.entries.ranks = prompts.entries.ranks.tobytes()
        if (told := result.logprobs) is not None:
            wire.logprobs.entry_counts = told.entry_counts.tobytes()
            wire.logprobs.token_ids = told.token_ids.tobytes()
            wire.logprobs.logprobs = told.logprobs.tobytes()
            wire.logprobs.ranks = told.ranks.tobytes()
        return wire

    def _hello(self) -> worker_pb2.WorkerHello:
        hello = worker_pb2.WorkerHello(
            worker_id=self.id,
            pid=1,
            model=MODEL,
            layout=layout(self.limits.block_size),
            kv_cache=worker_pb2.KVCache(num_blocks=self.limits.num_blocks),
            limits=worker_pb2.StepLimits(
                max_num_seqs=self.limits.max_num_seqs,
                max_num_batched_tokens=self.limits.max_num_batched_tokens,
                max_model_len=self.limits.max_model_len,
            ),
            weights_state=worker_pb2.WeightsState(
                weights=self.has_weights,
                asleep=self.asleep,
                sleep_level=self.sleep_level,
                stages_beside_steps=self.stages_beside_steps,
            ),
        )
        hello.MergeFrom(self.hello)
        return hello


def _plan(wire: worker_pb2.StepPlan, paper: ReferenceWorker) -> StepPlan:
    """Returns the plan as values; its number of tokens is derived by the reference worker."""
    plan = StepPlan(
        wire.step_id,
        0,
        columns.u32(wire.released_slots).tolist(),
        [_admission(admission) for admission in wire.admitted],
        columns.u32(wire.counted_slots).tolist(),
        columns.u32(wire.token_counts).tolist(),
        columns.u32(wire.new_block_ids).tolist(),
        copies=list(
            zip(
                columns.u32(wire.copies.from_block_ids).tolist(),
                columns.u32(wire.copies.to_block_ids).tolist(),
                strict=True,
            )
        ),
        beam_moves=[
            BeamMove(*move[:3], last_blocks=move[3:])  # one KV group
            for move in zip(
                columns.u32(wire.beams.slots).tolist(),
                columns.u32(wire.beams.parents).tolist(),
                columns.i32(wire.beams.token_ids).tolist(),
                columns.u32(wire.beams.last_block_ids).tolist(),
                strict=True,
            )
        ],
    )
    return paper.with_derived_tokens(plan)


def _admission(wire: worker_pb2.Admission) -> Admission:
    asked = wire.prompt_logprobs_from
    nobody = Sequence(wire.sequence_key, 0, 0, SequenceTokens(), wire.num_prompt_tokens, 0, prompt_logprobs_from=asked)
    nobody.is_beam = wire.HasField("num_logprobs")
    nobody.payload = Payload(wire.params, num_logprobs=wire.num_logprobs)
    return Admission(wire.slot, nobody, wire.token_ids, wire.num_cached_tokens)


@dataclass
class FrontendPeer:
    """Submits prompts and collects the results."""

    address: str
    hello: scheduler_pb2.FrontendHello = field(default_factory=lambda: scheduler_pb2.FrontendHello(frontend_id="f0"))
    tokens: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    weight_versions: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))  # of its tokens
    told: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))  # prompt positions
    cached: dict[int, int] = field(default_factory=dict)
    finished: dict[int, scheduler_pb2.FinishedSequence] = field(default_factory=dict)
    view: scheduler_pb2.ClusterView = field(default_factory=scheduler_pb2.ClusterView)
    num_submissions_sent: int = 0  # messages
    dialler: Dialler = field(default_factory=Dialler)

    async def open(self) -> None:
        self.channel = self.dialler.connect(self.address)
        self.call = scheduler_pb2_grpc.SchedulerServiceStub(self.channel).Session()
        await self.dialler.handshake(self.call, scheduler_pb2.SessionRequest, FRONTENDS, self.address, known=True)
        self.link = Duplex(
            PartStream(self.call), scheduler_pb2.SessionRequest(heartbeat=scheduler_pb2.Heartbeat()), HEARTBEAT_S
        )
        self.hello.model.CopyFrom(MODEL)
        self.link.send(scheduler_pb2.SessionRequest(hello=self.hello))
        self.changed = asyncio.Condition()
        self.session = asyncio.ensure_future(lifecycle.run_until_first(self.link.pump(), self._read()))

    async def close(self) -> None:
        self.session.cancel()
        self.call.cancel()
        await self.channel.close()

    async def submit(
        self, first: int, prompt: list[int], max_tokens: int = 8, *, behind_the_last: bool = False, **fields: object
    ) -> None:
        """`behind_the_last`: sends the submission in one message with the one before, if that has not been sent."""
        root = block_hash.root_hash()
        submission = scheduler_pb2.Submission(
            first_sequence_id=first,
            num_sequences=1,
            token_ids=columns.i32_bytes(prompt),
            num_prompt_tokens=len(prompt),
            root_hash=root,
            max_tokens=max_tokens,
            eos_token_ids=columns.u32_bytes([EOS]),
        )
        for name, value in fields.items():
            if isinstance(value, Message):
                getattr(submission, name).MergeFrom(value)
            else:
                setattr(submission, name, value)
        last = self.link.last_unsent
        if behind_the_last and last is not None and last.HasField("submission"):
            last.further_submissions.append(submission)
            return
        self.num_submissions_sent += 1
        self.link.send(scheduler_pb2.SessionRequest(submission=submission))

    async def cancel(self, *streams: int, reason: int = finish_pb2.FINISH_REASON_CANCELLED) -> None:
        cancellation = scheduler_pb2.Cancellation(sequence_ids=columns.u32_bytes(streams), reason=reason)
        self.link.send(scheduler_pb2.SessionRequest(cancellation=cancellation))

    async def until(self, holds: object) -> None:
        """Waits until `holds()` is true, checking after each received message."""
        async with asyncio.timeout(60), self.changed:
            await self.changed.wait_for(holds)

    async def ended(self, *streams: int) -> None:
        await self.until(lambda: all(stream in self.finished for stream in streams))

    async def _read(self) -> None:
        async for message in self.link.messages():
            async with self.changed:
                if message.HasField("cluster"):
                    self.view = message.cluster
                elif message.HasField("tokens"):
                    self.take(message.tokens)
                self.changed.notify_all()

    def take(self, batch: scheduler_pb2.TokenBatch) -> None:
        for started in batch.started:
            assert started.sequence_id not in self.cached
            self.cached[started.sequence_id] = started.num_cached_tokens
        told = iter(columns.u32(batch.prompt_logprobs.ranks).tolist())
        prompts = batch.prompt_logprobs
        for stream, count in zip(columns.u32(prompts.sequence_ids), columns.u32(prompts.position_counts), strict=True):
            self.told[int(stream)] += [next(told) for _ in range(count)]
        streams, tokens = columns.u32(batch.sequence_ids).tolist(), columns.i32(batch.token_ids).tolist()
        counts = columns.u32(batch.token_counts).tolist() if batch.token_counts else [1] * len(streams)
        rest = iter(tokens)
        for stream, count in zip(streams, counts, strict=True):
            assert stream not in self.finished
            self.weight_versions[stream].add(batch.weight_version or "0")
            self.tokens[stream] += [next(rest) for _ in range(count)]
        for finished in batch.finished:
            assert finished.sequence_id not in self.finished
            self.finished[finished.sequence_id] = finished
