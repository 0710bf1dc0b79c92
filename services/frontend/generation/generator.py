"""Turns requests into generations: the one entry point for all edges."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.directory.prefix_lookup import PrefixLocator
from quire.services.frontend.generation.catalogue import Catalogue
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.media.stage_clock import MediaTimes
from quire.services.frontend.media.store import MediaHolds
from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from quire.services.frontend.request.request import Request
from quire.services.frontend.scheduler_client.client import ClusterLimits, SchedulerClient
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument, QuireError
from quire.shared.metrics.frontend import FrontendMetrics

Resume = Callable[[Generation], None]


class Generator:
    """Checks, admits, tokenizes and submits requests; the entry point of every edge to the model."""

    def __init__(
        self,
        *,
        catalogue: Catalogue,
        processor: InputProcessor,
        prefix_locator: PrefixLocator,
        client: SchedulerClient,
        tokenizer: Tokenizer,
        formats: AnswerFormats,
        metrics: FrontendMetrics,
        stream_interval: int,
    ) -> None:
        """Stores the collaborators. `stream_interval`: minimum number of tokens between two messages of a sample."""
        self._catalogue = catalogue
        self._processor = processor
        self._prefix_locator = prefix_locator
        self._client = client
        self._tokenizer = tokenizer
        self._formats = formats
        self._metrics = metrics
        self._stream_interval = stream_interval
        self.pace = WakeupPacer(metrics.write.observe)

    @asynccontextmanager
    async def start(self, request: Request, call: Call, resume: Resume | None = None) -> AsyncIterator[Generation]:
        """Starts a request and yields its generation. Raises the error that the client gets instead of an answer; later
        errors come out of the generation. Admission and sequences are released at the end of this context or of the
        call, whichever comes first. `resume`: restores a generation that another frontend started, before anything is
        submitted."""
        if call.caller is not None:
            request = call.caller.authorize(request, self._catalogue.served_name(request.model))
        traceparent = call.begin_trace()
        if traceparent:
            request = replace(request, traceparent=traceparent)
        call.request = request
        max_model_len = self._catalogue.max_model_len(request.model)
        adapter = self._catalogue.adapter_name(request.model)
        if adapter:
            request = replace(request, adapter=adapter)
        request = await self._checked(request, max_model_len)
        piece = request.sampling.n if len(request.prompts) > 1 else 0
        call.lease.acquire(request.num_samples, self._processor.estimate_tokens(request, max_model_len), piece)
        limits = self._client.limits or await self._first_limits(request, call)
        with self._processor.holding_media(request) as media:  # until the generation has ended: workers fetch them
            prepared = await self._prepare(request, limits, media)
            cached = await self._prefix_locator.cached_tokens([prompt.prompt_request for prompt in prepared])
            num_prompt_tokens = sum(prompt.num_tokens for prompt in prepared)
            call.lease.adjust_tokens(num_prompt_tokens + request.max_requested_output_tokens(limits.max_model_len))
            with self._generation(request, prepared, media.times) as generation:
                call.generation = generation
                if resume is not None:
                    resume(generation)
                await generation.begin(cached, call.lease if call.lease.is_partial else None)
                yield generation

    async def _first_limits(self, request: Request, call: Call) -> ClusterLimits:
        """Waits for the first usable cluster and returns its limits. All waiting requests wake at once and then
        continue one by one. Raises NotFound for a model name that is no adapter either, Unavailable,
        DeadlineExceeded."""
        limits = await self._client.wait_for_limits(request.deadline_s)
        self._catalogue.check(request.model)  # until now any name could be an adapter's
        await call.wait_turn()
        return limits

    def _generation(self, request: Request, prepared: list[PreparedPrompt], media: MediaTimes | None) -> Generation:
        """Returns the generation of a request whose prompts are tokenized; nothing is submitted yet."""
        return Generation(
            request,
            prepared=prepared,
            client=self._client,
            tokenizer=self._tokenizer,
            formats=self._formats,
            metrics=self._metrics,
            pace=self.pace,
            media=media,
        )

    async def _checked(self, request: Request, max_model_len: int) -> Request:
        """Returns the request with its stream interval raised to the server's minimum and the tools' constraint added.
        Raises InvalidArgument for parameters, lengths and output formats that the model or the server does not
        allow."""
        self._processor.check(request, max_model_len)
        if request.stream_interval < self._stream_interval:
            request = replace(request, stream_interval=self._stream_interval)
        self._formats.check(request)
        return await self._constrained(request)

    async def _constrained(self, request: Request) -> Request:
        """Returns the request with the output constraint that its tools require, checked again. Raises InvalidArgument
        that names the field as the client sent it."""
        constrained = await self._formats.with_constraint(request)
        if constrained is not request:
            try:
                self._processor.check(constrained)
            except InvalidArgument as error:
                raise self._formats.with_client_field(error, constrained) from None
        return constrained

    async def _prepare(self, request: Request, limits: ClusterLimits, media: MediaHolds) -> list[PreparedPrompt]:
        """Returns the tokenized prompts. Raises QuireError, with the field named as the client sent it and without a
        traceback."""
        try:
            return await self._processor.prepare(request, limits, media)
        except QuireError as error:
            refusal = self._formats.with_client_field(error, request) if isinstance(error, InvalidArgument) else error
        try:
            raise refusal.with_traceback(
                None
            )  # the traceback's frames would keep the tokens alive as long as the error
        finally:
            del refusal
