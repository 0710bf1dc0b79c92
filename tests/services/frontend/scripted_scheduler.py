"""Scripted scheduler: real gRPC, and a "model" that is a function of the tokens so far."""

from __future__ import annotations

import asyncio
import itertools
from array import array
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio

from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.plan import Admission
from quire.shared.columns import f32_bytes, i32, i32_bytes, u32, u32_bytes
from quire.shared.pb.admin.v1 import admin_pb2
from quire.shared.pb.common.v1 import finish_pb2, model_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2_grpc
from quire.shared.process.lifecycle import run_until_first
from quire.shared.rpc.duplex import Duplex
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.server import Server
from tests.waiting import eventually

EPOCHS = itertools.count(1)
IDLE_S = 0.01  # step time while no sequence runs
SLOWLY_S = 0.01  # step time for tests that need an answer in pieces: output is merged while a frontend is blocked
# a session ends after five silent intervals: scheduler, frontend and client are one process, which may be blocked
HEARTBEAT_S = 1.0

STOP = finish_pb2.FINISH_REASON_STOP
LENGTH = finish_pb2.FINISH_REASON_LENGTH
REPETITION = finish_pb2.FINISH_REASON_REPETITION
CANCELLED = finish_pb2.FINISH_REASON_CANCELLED


class ReceivedSubmission:
    """Submission, with the worker's view of its first sample in `params` and `sampling`."""

    def __init__(self, submission: pb.Submission) -> None:
        self._submission = submission
        first = Admission(
            slot=0,
            params=submission.params,
            sample=submission.first_sample,
            num_prompt_tokens=submission.num_prompt_tokens,
            prompt_logprobs_from=submission.prompt_logprobs_from,
            samples_nothing=submission.samples_nothing,
        )
        self.params = SlotAdmission.of(first)
        self.sampling = self.params.sampling
        if submission.grammar:
            self.sampling.structured_output.ParseFromString(submission.grammar)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._submission, name)


@dataclass
class Running:
    """Sequence that the script runs."""

    id: int
    number: int
    submission: ReceivedSubmission
    tokens: array[int]
    eos: frozenset[int]
    stop_ids: frozenset[int]
    started: bool = False
    num_reported: int = 0  # number of prompt positions whose log-probabilities were sent

    @property
    def unreported_positions(self) -> range:
        """Returns the prompt positions whose log-probabilities were not sent yet."""
        first = self.submission.prompt_logprobs_from if self.number == 0 else 0
        return range(first + self.num_reported, self.submission.num_prompt_tokens) if first else range(0)

    @property
    def seed(self) -> int:
        return self.submission.sampling.seed + self.number

    @property
    def prompt(self) -> array[int]:
        return self.tokens[: self.submission.num_prompt_tokens]

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.submission.num_prompt_tokens

    @property
    def repeats(self) -> bool:
        """Whether the output ends with copies of its last tokens; checks the longest pattern only, which suffices for a
        script."""
        rule = self.submission.repetition_detection
        size, count = rule.max_pattern_size, rule.min_count
        tail = self.tokens[-size * count :]
        return bool(size) and size * count <= self.num_outputs and tail == tail[:size] * count


Model = Callable[[Running], int]


def echo(sequence: Running) -> int:
    """Repeats the prompt, then ends."""
    prompt, position = sequence.prompt, sequence.num_outputs
    if position < len(prompt):
        return prompt[position]
    return min(sequence.eos, default=prompt[position % len(prompt)])


def count_up(sequence: Running) -> int:
    """Counts up from the seed, modulo 200."""
    if sequence.num_outputs == 0:
        return sequence.seed % 200
    return (sequence.tokens[-1] + 1) % 200


@dataclass
class Session:
    """Session with one frontend."""

    duplex: Duplex[pb.SessionRequest, pb.SessionResponse]
    hello: pb.FrontendHello
    broken: asyncio.Event = field(default_factory=asyncio.Event)
    running: dict[int, Running] = field(default_factory=dict)
    waiting: list[pb.FinishedSequence] = field(default_factory=list)


class ScriptedScheduler(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Scheduler that steps every `step_s` unless paused, and records all messages for tests."""

    def __init__(self, model: Model = echo, *, step_s: float = 0.001, **view: Any) -> None:
        self.model = model
        self.step_s = step_s
        self.scheduler_id = "scripted"
        self.epoch = next(EPOCHS)
        self.tokens_per_step = 1
        self.prompt_positions_per_step = 1000
        self.num_cached_tokens = 0
        self.num_preemptions = 0  # of each sequence that ends
        self.gives_vectors = True
        self.compares = True
        self.refusal: finish_pb2.Error | None = None
        self.reject_hello: str | None = None
        self.takes_further_submissions = True
        self.weights_told: list[model_pb2.WeightsIdentity] = []
        self.view = pb.ClusterView(
            **{
                "layout": model_pb2.BlockLayout(block_size=16, hash_scheme="sha256/1"),
                "max_model_len": 512,
                "num_workers": 1,
                "max_logprobs": 20,
                "scheduling_policy": "fcfs",
                "media_modalities": ["image", "video", "audio"],
                **view,
            }
        )
        self.hellos: list[pb.FrontendHello] = []
        self.submissions: list[ReceivedSubmission] = []
        self.cancellations: list[tuple[list[int], int]] = []
        self.resets = 0
        self.updates: list[int] = []  # numbers of the swapped-in updates
        self.pause_mode: int | None = None
        self.operated: list[str] = []  # names of the loaded and unloaded adapters
        self.adapter_refusal: tuple[grpc.StatusCode, str] | None = None
        self.steps = 0
        self.is_heard: Callable[[], bool] = lambda: True  # steps wait until it is true
        self.sessions: list[Session] = []
        self._go = asyncio.Event()
        self._go.set()
        self._changed = asyncio.Condition()
        self.address = ""

    def pause(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    async def until(self, condition: Callable[[], Any]) -> None:
        async with self._changed, asyncio.timeout(60):
            await self._changed.wait_for(condition)

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()

    def break_sessions(self) -> None:
        for session in self.sessions:
            session.broken.set()

    def set_view(self, **view: Any) -> None:
        for name, value in view.items():
            setattr(self.view, name, value)
        for session in self.sessions:
            session.duplex.send(pb.SessionResponse(cluster=self.view))

    @property
    def num_running(self) -> int:
        return sum(len(session.running) for session in self.sessions)

    @property
    def most_outputs(self) -> int:
        """Maximum number of output tokens of the running sequences."""
        return max((one.num_outputs for session in self.sessions for one in session.running.values()), default=0)

    async def Session(self, request_iterator: Any, context: Any) -> None:
        hello = (await context.read()).hello
        self.hellos.append(hello)
        if self.reject_hello is not None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, self.reject_hello)
        heartbeat = pb.SessionResponse(heartbeat=pb.Heartbeat())
        session = Session(Duplex(PartStream(context), heartbeat, HEARTBEAT_S), hello)
        welcome = pb.SchedulerWelcome(
            scheduler_id=self.scheduler_id,
            epoch=self.epoch,
            version="test",
            heartbeat_interval_ms=round(1000 * HEARTBEAT_S),
            takes_further_submissions=self.takes_further_submissions,
        )
        session.duplex.send(pb.SessionResponse(welcome=welcome))
        session.duplex.send(pb.SessionResponse(cluster=self.view))
        self.sessions.append(session)
        try:
            await run_until_first(session.duplex.pump(), self._read(session), session.broken.wait())
        finally:
            self.sessions.remove(session)
            await self._notify()
        if session.broken.is_set():
            await context.abort(grpc.StatusCode.UNAVAILABLE, "broken by the script")

    async def _read(self, session: Session) -> None:
        async for message in session.duplex.messages():
            match message.WhichOneof("message"):
                case "submission":
                    for submission in (message.submission, *message.further_submissions):
                        self._submit(session, submission)
                case "cancellation":
                    self._cancel(session, message.cancellation)
                case "weights":
                    self.weights_told.append(message.weights)
            await self._notify()

    def _submit(self, session: Session, message: pb.Submission) -> None:
        submission = ReceivedSubmission(message)
        self.submissions.append(submission)
        for number in range(submission.num_sequences):
            sequence_id = submission.first_sequence_id + number
            assert sequence_id not in session.running
            if self.refusal is not None:
                refused = pb.FinishedSequence(
                    sequence_id=sequence_id, reason=finish_pb2.FINISH_REASON_ERROR, error=self.refusal
                )
                session.waiting.append(refused)
                continue
            session.running[sequence_id] = Running(
                sequence_id,
                number,
                submission,
                array("i", submission.token_ids),
                frozenset(u32(submission.eos_token_ids).tolist()),
                frozenset(u32(submission.stop_token_ids).tolist()),
            )

    def _cancel(self, session: Session, cancellation: pb.Cancellation) -> None:
        ids = u32(cancellation.sequence_ids).tolist()
        self.cancellations.append((ids, cancellation.reason))
        for sequence_id in ids:
            if session.running.pop(sequence_id, None) is not None:
                session.waiting.append(pb.FinishedSequence(sequence_id=sequence_id, reason=cancellation.reason))

    async def run_steps(self) -> None:
        while True:
            await self._go.wait()
            await eventually(self.is_heard)
            for session in self.sessions:
                self._step(session)
            self.steps += 1
            await self._notify()
            has_work = any(session.running or session.waiting for session in self.sessions)
            await asyncio.sleep(self.step_s if has_work else max(self.step_s, IDLE_S))

    def _step(self, session: Session) -> None:
        if not session.running and not session.waiting:
            return
        batch = pb.TokenBatch(finished=session.waiting)
        session.waiting = []
        ids: list[int] = []
        counts: list[int] = []
        tokens: list[int] = []
        asked: list[tuple[Running, int]] = []
        for sequence in list(session.running.values()):
            if not sequence.started:
                sequence.started = True
                batch.started.add(
                    sequence_id=sequence.id,
                    num_cached_tokens=self.num_cached_tokens,
                    queue_us=1000,
                    encode_us=20 if sequence.submission.media else 0,
                )
            if sequence.submission.samples_nothing:
                del session.running[sequence.id]
                self._pool(batch, sequence)
                continue
            if sequence.unreported_positions:
                self._add_prompt_logprobs(batch.prompt_logprobs, sequence)
            if sequence.unreported_positions:
                continue
            new, end = self._advance(sequence)
            ids.append(sequence.id)
            counts.append(len(new))
            tokens += new
            if sequence.submission.asks_logprobs:
                asked.append((sequence, len(new)))
            if end is not None:
                end.num_preemptions = self.num_preemptions
                del session.running[sequence.id]
                batch.finished.append(end)
        batch.sequence_ids = u32_bytes(ids)
        batch.token_ids = i32_bytes(tokens)
        if any(count != 1 for count in counts):
            batch.token_counts = u32_bytes(counts)
        if asked:
            batch.logprobs.CopyFrom(_logprobs(asked))
        session.duplex.send(pb.SessionResponse(tokens=batch))

    def _pool(self, batch: pb.TokenBatch, sequence: Running) -> None:
        """Adds a prompt's vector: its length and first token; with a query, the sum of both lengths."""
        batch.finished.add(sequence_id=sequence.id, reason=STOP)
        if sequence.submission.HasField("late_query") and self.compares:
            batch.pooled.sequence_ids += u32_bytes([sequence.id])
            batch.pooled.sizes += u32_bytes([1])
            length = len(sequence.tokens) + len(sequence.submission.late_query.token_ids) // 4
            batch.pooled.values += f32_bytes([float(length)])
        elif self.gives_vectors:
            batch.pooled.sequence_ids += u32_bytes([sequence.id])
            batch.pooled.sizes += u32_bytes([2])
            batch.pooled.values += f32_bytes([float(len(sequence.tokens)), float(sequence.tokens[0])])

    def _add_prompt_logprobs(self, batch: pb.PromptLogprobBatch, sequence: Running) -> None:
        """Adds prompt log-probabilities: minus the position for the prompt's token, -(i + 1) for the i-th of the
        others."""
        positions = sequence.unreported_positions[: self.prompt_positions_per_step]
        sequence.num_reported += len(positions)
        num_top = sequence.submission.sampling.prompt_logprobs
        tokens = [
            [sequence.tokens[p], *((sequence.tokens[p] + 1 + i) % 200 for i in range(num_top))] for p in positions
        ]
        batch.sequence_ids += u32_bytes([sequence.id])
        batch.position_counts += u32_bytes([len(positions)])
        batch.entry_counts += u32_bytes([1 + num_top] * len(positions))
        batch.token_ids += i32_bytes([token for row in tokens for token in row])
        batch.logprobs += f32_bytes([value for p in positions for value in (-p, *(-(i + 1.0) for i in range(num_top)))])
        batch.ranks += u32_bytes(list(positions))

    def _advance(self, sequence: Running) -> tuple[list[int], pb.FinishedSequence | None]:
        new: list[int] = []
        for _ in range(self.tokens_per_step):
            token = self.model(sequence)
            sequence.tokens.append(token)
            new.append(token)
            if token in sequence.eos:
                return new, pb.FinishedSequence(sequence_id=sequence.id, reason=STOP)
            if token in sequence.stop_ids:
                return new, pb.FinishedSequence(sequence_id=sequence.id, reason=STOP, stop_token_id=token)
            if sequence.num_outputs >= sequence.submission.max_tokens:
                return new, pb.FinishedSequence(sequence_id=sequence.id, reason=LENGTH)
            if sequence.repeats:
                return new, pb.FinishedSequence(sequence_id=sequence.id, reason=REPETITION)
        return new, None

    async def Administer(self, _requests: Any, context: Any) -> None:
        question = await context.read()
        kind = question.WhichOneof("message")
        if question.HasField("get_status"):
            answer = pb.AdministerResponse(status=self._status())
        elif question.HasField("pause_generation"):
            self.pause_mode = question.pause_generation.mode
            paused = admin_pb2.PauseGenerationResponse(num_kept=3, num_aborted=4)
            answer = pb.AdministerResponse(generation_paused=paused)
        elif question.HasField("resume_generation"):
            self.pause_mode = None
            answer = pb.AdministerResponse(generation_resumed=admin_pb2.ResumeGenerationResponse())
        elif kind == "update_weights":
            answer = await self._update(question.update_weights, context)
        elif kind.endswith("adapter") or kind == "list_adapters":
            answer = await self._adapters(kind, question, context)
        else:
            answer = pb.AdministerResponse(prefix_cache_reset=await self._reset(question.reset_prefix_cache, context))
        await context.write(answer)

    async def _update(self, request: pb.UpdateWeights, context: Any) -> pb.AdministerResponse:
        if request.update <= self.view.weights.update:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"update: {request.update} is not greater")
        await context.write(pb.AdministerResponse(weights_staged=pb.WeightsStaged(num_workers=1)))
        assert (await context.read()).HasField("swap_weights")
        self.updates.append(request.update)
        version = request.request.weight_version
        self.view.weights.CopyFrom(model_pb2.WeightsIdentity(update=request.update, version=version))
        self.set_view()
        return pb.AdministerResponse(
            weights_updated=admin_pb2.UpdateWeightsResponse(weight_version=version, num_workers=1)
        )

    async def _adapters(self, kind: str, question: Any, context: Any) -> pb.AdministerResponse:
        """Loads or unloads an adapter; the view follows later."""
        asked = getattr(question, kind)
        if kind == "list_adapters":
            listed = [admin_pb2.Adapter(name=name, num_workers=2, num_sequences=1) for name in self.view.adapters]
            return pb.AdministerResponse(adapters=admin_pb2.ListAdaptersResponse(adapters=listed))
        self.operated.append(f"{kind} {asked.name}")
        if self.adapter_refusal is not None:
            await context.abort(*self.adapter_refusal)
        names = {*self.view.adapters} - {asked.name}
        if kind == "load_adapter":
            names.add(asked.name)
        elif asked.name not in self.view.adapters:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such adapter")
        self.view.ClearField("adapters")
        self.view.adapters.extend(sorted(names))
        self.view.adapter_digests = b"d" * 32 * len(names)
        asyncio.get_running_loop().call_later(0.05, self.set_view)
        if kind == "load_adapter":
            loaded = admin_pb2.LoadAdapterResponse(digest=b"d" * 32, num_workers=2)
            return pb.AdministerResponse(adapter_loaded=loaded)
        return pb.AdministerResponse(adapter_unloaded=admin_pb2.UnloadAdapterResponse(num_sequences=3))

    def _status(self) -> admin_pb2.GetStatusResponse:
        status = admin_pb2.ServiceStatus(
            role=admin_pb2.ROLE_SCHEDULER, id=self.address, address=self.address, state=admin_pb2.STATE_READY
        )
        frontends = [
            admin_pb2.ServiceStatus(role=admin_pb2.ROLE_FRONTEND, id=session.hello.frontend_id)
            for session in self.sessions
        ]
        return admin_pb2.GetStatusResponse(services=[status, *frontends])

    async def _reset(self, request: Any, context: Any) -> admin_pb2.ResetPrefixCacheResponse:
        if self.num_running and not request.preempt_running:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "sequences run")
        self.resets += 1
        return admin_pb2.ResetPrefixCacheResponse(num_blocks=7)


def _logprobs(asked: Iterable[tuple[Running, int]]) -> pb.LogprobBatch:
    """Returns log-probabilities: -0.5 for the sampled token, -(i + 1) for the i-th of the top list or of the named
    ones."""
    ids, counts, tokens, values, ranks = [], [], [], [], []
    for sequence, num_new in asked:
        named = sequence.submission.sampling.logprob_token_ids
        num_top = len(named) or sequence.submission.sampling.logprobs
        ids.append(sequence.id)
        counts.append(1 + num_top)
        for token in sequence.tokens[len(sequence.tokens) - num_new :]:
            tokens += [token, *(named or ((token + 1 + i) % 200 for i in range(num_top)))]
            values += [-0.5, *(-(i + 1.0) for i in range(num_top))]
            ranks.append(1)
    return pb.LogprobBatch(
        sequence_ids=u32_bytes(ids),
        entry_counts=u32_bytes(counts),
        token_ids=i32_bytes(tokens),
        logprobs=f32_bytes(values),
        ranks=u32_bytes(ranks),
    )


def prompt_of(submission: pb.Submission) -> list[int]:
    ids: list[int] = i32(submission.token_ids).tolist()
    return ids[: submission.num_prompt_tokens]


@contextmanager
def slowly(script: ScriptedScheduler) -> Iterator[None]:
    """Slows the script down, so that slow clients can read part of an answer before its end."""
    usual_s, script.step_s = script.step_s, 5 * script.step_s
    try:
        yield
    finally:
        script.step_s = usual_s


@asynccontextmanager
async def scheduler(script: ScriptedScheduler, port: int = 0) -> AsyncIterator[ScriptedScheduler]:
    server = Server("127.0.0.1", port, ())
    scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(script, server.methods)
    await server.start()
    script.address = f"127.0.0.1:{server.port}"
    steps = asyncio.create_task(script.run_steps())
    try:
        yield script
    finally:
        steps.cancel()
        await asyncio.gather(steps, return_exceptions=True)
        script.break_sessions()
        await server.stop(0)
