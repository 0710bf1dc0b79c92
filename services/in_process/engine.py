"""Frontend, scheduler and worker as one object: requests go in, step() computes, answers come out. No sockets, no
processes, and no threads other than those that tokenize and compile grammars.

The code is that of the services: the frontend interprets requests, the scheduler's core schedules, the worker computes.
A submission is the message that would be sent otherwise; steps are passed as plain values (steps.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from quire.services.frontend.composition.media import prompt_media, read_processors
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.grpc_edge import requests, responses
from quire.services.frontend.grpc_edge.requests import Arrival
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.media.pipeline import NoMedia
from quire.services.frontend.media.store import MediaStore
from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from quire.services.frontend.scheduler_client import submission, token_batch
from quire.services.frontend.scheduler_client.client import ClusterLimits
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.services.in_process.adapters import EngineAdapters
from quire.services.in_process.engine_core import EngineCore
from quire.services.in_process.pixels import StorePixels
from quire.services.scheduler.frontends.batches import OwnerBatches
from quire.services.scheduler.frontends.submissions import SequenceFactory
from quire.services.worker.models.loading.weights import NewWeights, as_tensors
from quire.services.worker.step.fetched_item import Pixels
from quire.services.worker.structured.backends import backend_selection
from quire.shared.errors import FailedPrecondition, Internal, InvalidArgument, QuireError
from quire.shared.kv import block_hash
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.models import model_identity
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.settings import FrontendSettings, SchedulerSettings, WorkerSettings

OWNER = 1  # owner id of all sequences


@dataclass(slots=True)
class ActiveRequest:
    """Request that has not ended; `is_first`: no message of it has been returned yet."""

    generation: Generation
    media: ExitStack  # holds the request's media in the store
    is_first: bool = True


@dataclass(frozen=True, slots=True)
class RequestUpdate:
    """Update of one request: the output added to its samples, or why it failed."""

    request_id: str
    messages: list[pb.GenerateResponse] = field(default_factory=list)
    error: QuireError | None = None
    finished: bool = False


class InProcessEngine:
    """Engine for use by one thread; add(), step() and abort() return when they are done."""

    def __init__(self, frontend: FrontendSettings, scheduler: SchedulerSettings, worker: WorkerSettings) -> None:
        """Loads the model. Raises QuireError if the settings or the checkpoint are invalid."""
        folder = Path(frontend.model)
        identity = model_identity.identity(folder, frontend.served_model_name)
        self.model_name = identity.name
        processors = read_processors(frontend)
        self._tokenizer = Tokenizer(
            folder,
            frontend.tokenizer_threads,
            frontend.chat_template,
            frontend.control_tokens,
            placeholder_ids=processors.placeholder_ids,
        )
        self._media = prompt_media(frontend, processors, self._tokenizer)
        self._pixels = StorePixels(MediaStore(0, 0) if self._media is None else self._media.store)
        self._engine_core = EngineCore(worker, scheduler, identity.name, OWNER, self._fetch_pixels)
        config = model_identity.read_config(folder)
        self.metrics = FrontendMetrics(identity.name, config.get("max_position_embeddings", identity.vocab_size))
        self._processor = InputProcessor(
            self._tokenizer,
            identity.vocab_size,
            frontend.max_prompts_per_request,
            frontend.request_limits,
            model_identity.class_names(config),
            media=self._media or NoMedia(),
        )
        self._formats = AnswerFormats("none", "none", self._tokenizer)
        self._pace = WakeupPacer(self.metrics.write.observe)
        sizes = self._engine_core.core.limits
        self._limits = ClusterLimits(
            sizes.max_model_len,
            worker.max_logprobs,
            frozenset({scheduler.scheduling_policy}),
            grammar_libraries=backend_selection.library_names(worker.structured_output_backend),
        )
        layout = model_pb2.BlockLayout(block_size=sizes.block_size, hash_scheme=block_hash.SCHEME)
        self._loop = asyncio.new_event_loop()  # last: an exception above must not leave the loop open
        self._scheduler_client = InProcessSchedulerClient(self._engine_core, layout, self._loop)
        self._open: dict[str, ActiveRequest] = {}

    @property
    def num_unfinished(self) -> int:
        return len(self._open)

    def add(self, message: pb.GenerateRequest) -> str:
        """Adds a request; returns its id. Raises QuireError if it cannot run."""
        return self._loop.run_until_complete(self._add(message))

    async def _add(self, message: pb.GenerateRequest) -> str:
        """Checks a request, tokenizes its prompts and submits its sequences; returns the request's id. Raises
        QuireError if the model is unknown, the id is in use or the request cannot run."""
        request = requests.generate_request(message, Arrival(self._loop.time(), None), self._tokenizer.defaults)
        if request.model not in ("", self.model_name):
            request = replace(request, adapter=request.model)
        if request.request_id in self._open:
            text = f"request_id: {request.request_id[:64]!r} belongs to a request that has not ended"
            raise InvalidArgument(text, field="request_id")
        self._processor.check(request, self._limits.max_model_len)
        with ExitStack() as opened:
            media = opened.enter_context(self._processor.holding_media(request))
            prepared = await self._processor.prepare(request, replace(self._limits, adapters=self.adapters), media)
            generation = Generation(
                request,
                prepared=prepared,
                client=self._scheduler_client,
                tokenizer=self._tokenizer,
                formats=self._formats,
                metrics=self.metrics,
                pace=self._pace,
                media=media.times,
            )
            await generation.begin([{}] * len(prepared))
            self._open[request.request_id] = ActiveRequest(generation, opened.pop_all())
        return request.request_id

    def abort(self, request_ids: Seq[str]) -> None:
        """Aborts requests and cancels their samples; they produce no further updates. Unknown ids are ignored."""
        for request_id in request_ids:
            request = self._open.pop(request_id, None)
            if request is not None:
                self._close(request)

    def step(self) -> list[RequestUpdate]:
        """Computes one step, if requests are open; returns the updates of the requests that have output, an error or
        an end. Requests that ended are closed."""
        if not self._open:
            return []
        self._scheduler_client.step()
        self._loop.run_until_complete(asyncio.sleep(0))  # runs deadlines and cancellations
        updates = [update for request_id, one in self._open.items() if (update := self._update_of(request_id, one))]
        for update in updates:
            if update.finished:
                self._close(self._open.pop(update.request_id))
        return updates

    def _update_of(self, request_id: str, request: ActiveRequest) -> RequestUpdate | None:
        """Returns the output of a request since its last update, or its error, which ends it; None if there is
        neither."""
        try:
            deltas = request.generation.take_pending()
        except QuireError as error:
            return RequestUpdate(request_id, error=error, finished=True)
        messages = []
        for delta in deltas:
            message = responses.generate_response(request_id, delta)
            responses.add_details(message, delta, request.generation, request.is_first)
            request.is_first = False
            messages.append(message)
        return RequestUpdate(request_id, messages, finished=not request.generation.num_unread) if messages else None

    def _close(self, request: ActiveRequest) -> None:
        """Ends a request on the event loop, which cancels its unfinished samples."""

        async def close() -> None:
            request.generation.__exit__(None, None, None)
            request.media.close()

        self._loop.run_until_complete(close())

    def _fetch_pixels(self, identifier: bytes) -> Pixels:
        """Returns the pixels of a media item that a request holds. Raises NotFound."""
        return self._loop.run_until_complete(self._pixels.fetch(identifier, ""))

    @property
    def adapters(self) -> dict[str, bytes]:
        """Digests by name: adapters that requests may name as their model."""
        return {} if self._engine_core.adapters is None else self._engine_core.adapters.offered

    def load_adapter(self, name: str, path: str, *, replace: bool) -> None:
        """Loads an adapter between two steps. Raises QuireError; then nothing has changed."""
        self._loop.run_until_complete(self._adapters.load(name, path, replace=replace))

    def unload_adapter(self, name: str) -> int:
        """Unloads an adapter once its sequences have ended; returns their number. Raises QuireError."""
        return self._loop.run_until_complete(self._adapters.unload(name))

    @property
    def _adapters(self) -> EngineAdapters:
        """Adapters of the engine; raises FailedPrecondition if it was created without lora_folders."""
        if self._engine_core.adapters is None:
            raise FailedPrecondition(
                "lora_folders: this engine was created without lora_folders, so it cannot load adapters"
            )
        return self._engine_core.adapters

    @property
    def weight_version(self) -> str:
        return self._engine_core.weight_version

    def update_weights(self, source: Path | Iterable[tuple[str, Any]], version: str) -> None:
        """Updates the weights between two steps. Raises QuireError; then nothing has changed."""
        given = source if isinstance(source, Path) else as_tensors(source)
        self._engine_core.update_weights(NewWeights(given, version))

    def close(self) -> None:
        """Aborts all requests and closes the tokenizer, the input processor and the event loop; the engine cannot be
        used afterwards."""
        self.abort([*self._open])
        self._tokenizer.close()
        self._processor.close()
        if self._media is not None:
            self._loop.run_until_complete(self._media.close())
        self._loop.close()


class InProcessSchedulerClient:
    """Scheduler client of a generation that submits to the engine core instead of a session."""

    def __init__(self, engine_core: EngineCore, layout: model_pb2.BlockLayout, loop: asyncio.AbstractEventLoop) -> None:
        self._engine_core, self._layout, self._loop = engine_core, layout, loop
        self._factory = SequenceFactory()
        self._next_id = 1
        self._live: dict[int, Sequence] = {}
        self._keys: dict[int, int] = {}  # core's key by sequence id; all results of a beam search have the same key

    def submit(self, sequences: Seq[Sequence], held: Mapping[str, int]) -> None:
        """Gives the sequences ids, builds them as the scheduler would from a submission, and adds them to the engine
        core. `held` is not used here."""
        message = submission.build(sequences, self._next_id, self._layout, self._loop.time())
        for sequence in sequences:
            sequence.id = self._next_id
            self._live[sequence.id] = sequence
            self._next_id += 1
        for core_sequence in self._factory.sequences(message, OWNER, self._loop.time()):
            for output in core_sequence.outputs or (core_sequence,):
                self._keys[output.sequence_id] = core_sequence.key
            self._engine_core.add(core_sequence)

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Marks sequences as inactive and cancels those that are live in the core; `reason` is not used here."""
        for sequence in sequences:
            sequence.is_active = False
            if self._live.pop(sequence.id, None) is not None:
                self._engine_core.cancel([self._keys.pop(sequence.id)])

    def step(self) -> None:
        """Computes a step and delivers its output to the samples' sinks; cancels samples that a stop string ended,
        and ends those with an error whose output cannot be delivered."""
        batches = OwnerBatches(self._engine_core.weight_version)
        batches.add(self._engine_core.step())
        for response in batches.by_owner.get(OWNER, ()):
            delivery = token_batch.deliver(response.tokens, self._live, self._loop.time())
            self.cancel_all(delivery.stopped)
            for sequence in delivery.broken:
                self._refuse(sequence, Internal("internal error"))
            for sequence, error in delivery.refused:
                self._refuse(sequence, error)
        self._keys = {sequence_id: key for sequence_id, key in self._keys.items() if sequence_id in self._live}

    def cancel_all(self, sequences: Seq[Sequence]) -> None:
        """Cancels sequences in the core that the client has already removed."""
        self._engine_core.cancel(
            key for sequence in sequences if (key := self._keys.pop(sequence.id, None)) is not None
        )

    def _refuse(self, sequence: Sequence, error: QuireError) -> None:
        """Cancels a sequence in the core and ends its sample with `error`, unless it has ended already."""
        self.cancel_all([sequence])
        if sequence.is_active:
            sequence.is_active = False
            sequence.sink.on_end(token_batch.error_end(error), self._loop.time())
