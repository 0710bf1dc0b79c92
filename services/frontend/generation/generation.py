"""One accepted request until its end: its samples, its deadline, what its reader gets."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from typing import Protocol

from quire.services.frontend.calls.measurements import LatencyBreakdown, Times, Usage
from quire.services.frontend.generation import generation_metrics
from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.output_processor.answer_parser import AnswerParser
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.detokenizer import PROMPT_END
from quire.services.frontend.output_processor.mailbox import Mailbox
from quire.services.frontend.output_processor.reasoning_tokens import ReasoningTokenCounter
from quire.services.frontend.output_processor.sample import AT_END, Sample
from quire.services.frontend.output_processor.sample_text import new_text
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from quire.services.frontend.request.request import Request, Sampling
from quire.services.frontend.scheduler_client.placement import CachedTokens
from quire.services.frontend.scheduler_client.sequence import Sequence, SequenceEnd
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import DeadlineExceeded, Internal, QuireError, ResourceExhausted
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason

TOKENS_IN_A_TURN = 16_384  # of the event loop: hashed and submitted in 2 ms
PER_SAMPLE_COST_TOKENS = 256  # what a sample costs besides its prompt
CLIENT_CLOCK_S = 0.1  # a client ends its call at its own deadline, which comes as a cancellation a little before ours


class Aborted(QuireError):
    """Somebody with a right to it has ended the request while it ran."""


class Submitter(Protocol):
    """The way to those who compute."""

    def submit(self, sequences: Seq[Sequence], cached: CachedTokens) -> None:
        """All samples of one work, in order, or one that has tokens; `cached`: who holds how much of its prompt."""

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Nothing more comes from these."""


class PromptSlots(Protocol):
    """Holds the slots of a call that begins with some of its prompts."""

    num_samples: int  # that may run at once

    def start_next_prompts(self, piece: int, num_left: int) -> int:
        """Returns how many prompts, of `piece` samples each, may begin where one has ended."""


class Generation:
    """Begin it in a `with`, iterate it for lists of deltas until every sample's finish was handed out or an error is
    raised. Leaving the `with` cancels what still runs."""

    def __init__(
        self,
        request: Request,
        *,
        prepared: Seq[PreparedPrompt],
        client: Submitter,
        tokenizer: Tokenizer,
        formats: AnswerFormats,
        metrics: FrontendMetrics,
        pace: WakeupPacer,
    ) -> None:
        self.request = request
        self.prepared = prepared
        self._client = client
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(pace)
        silent = _silent_tokens(request.sampling, tokenizer)
        self._parsers = formats.parsers(request, prepared)
        shown = formats.visible_tokens(request)
        self._samples = [self._new_sample(index, tokenizer, silent, shown) for index in range(request.num_samples)]
        self._sequences = [self._new_sequence(sample) for sample in self._samples]
        self._num_unread = len(self._samples)
        self._num_unfinished = [request.sampling.n] * len(prepared)  # samples, by prompt
        self._cached_tokens: dict[int, int] = {}  # by prompt, of the sample that started first
        self._queue_s: float | None = None
        self._submitted_s: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._resumes = False
        self._is_over = False  # nothing more is submitted
        self._cached: Seq[CachedTokens] = ()
        self._slots: PromptSlots | None = None
        self._num_begun = 0  # prompts
        self._num_tokens_read = [0] * len(self._samples)
        self._reasoning = (
            [ReasoningTokenCounter(formats.end_of_reasoning) for _ in self._samples] if self._parsers else []
        )

    def _new_sample(self, index: int, tokenizer: Tokenizer, silent: frozenset[int], shown: frozenset[str]) -> Sample:
        prompt = self.prepared[index // self.request.sampling.n]
        text = new_text(
            self.request.sampling,
            tokenizer,
            final_only=self.request.final_only,
            prompt_end=prompt.last_token_ids(PROMPT_END),
            shown=shown,
            parser=None if self._parsers is None else self._parsers[index],
        )
        return Sample(
            index,
            text,
            hidden_stop_ids=silent,
            mailbox=self._mailbox,
            traffic=self._metrics.traffic,
            owner=self,
            interval=AT_END if self.request.final_only else self.request.stream_interval,
        )

    def _new_sequence(self, sample: Sample) -> Sequence:
        prompt, number = divmod(sample.index, self.request.sampling.n)
        return Sequence(self.prepared[prompt].prompt_request, number, sample)

    def restore(self, told: SampleDelta) -> list[SampleDelta]:
        """Before begin(), of a request of one prompt: what another frontend has told its reader, without its text.
        Returns it as its reader got it."""
        sample, sequence = self._samples[told.sample], self._sequences[told.sample]
        self._resumes = True
        sample.restore(told, self._loop.time())
        sequence.tokens.extend(told.token_ids)
        sequence.num_prompt_logprobs += len(told.prompt_logprobs)
        if told.finish is not None:
            sequence.is_active = False
            self._num_unfinished[told.sample // self.request.sampling.n] -= 1
        return self.take_pending()

    async def begin(self, cached: Seq[CachedTokens], slots: PromptSlots | None = None) -> None:
        """Starts the clock and submits everything, in portions; `cached`: of each prompt, who holds how much. `slots`:
        only so many samples now, and further prompts as others end."""
        if self.request.deadline_s is not None:
            self._deadline = self._loop.call_at(self.request.deadline_s, self._expire)
        self._submitted_s = self._loop.time()
        if self._resumes:
            for sequence in self._sequences:
                self._client.submit([sequence], cached[0])
            return
        n, num_tokens = self.request.sampling.n, 0
        self._cached, self._slots = cached, slots
        self._num_begun = len(cached) if slots is None else min(len(cached), max(1, slots.num_samples // n))
        for prompt in range(self._num_begun):
            self._submit(prompt)
            num_tokens += self.prepared[prompt].prompt_request.num_prompt_tokens + PER_SAMPLE_COST_TOKENS * n
            if num_tokens > TOKENS_IN_A_TURN:
                num_tokens = 0
                await asyncio.sleep(0)

    def _submit(self, prompt: int) -> None:
        n = self.request.sampling.n
        self._client.submit(self._sequences[prompt * n : prompt * n + n], self._cached[prompt])

    def _begin_others(self) -> None:
        """Submits those prompts that may begin where one has ended."""
        if self._is_over or self._slots is None:
            return
        left = len(self.prepared) - self._num_begun
        for _ in range(self._slots.start_next_prompts(self.request.sampling.n, left)):
            self._num_begun += 1
            self._submit(self._num_begun - 1)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[SampleDelta]:
        if not self._num_unread:
            raise StopAsyncIteration
        return self._read(await self._mailbox.next_deltas())

    def take_pending(self) -> list[SampleDelta]:
        """News without waiting for any, instead of being iterated."""
        return self._read(self._mailbox.take_pending())

    @property
    def num_unread(self) -> int:
        """Samples whose end has not been read."""
        return self._num_unread

    @property
    def unfinished_samples(self) -> list[int]:
        """Samples that have not come to their own end."""
        return [sample.index for sample in self._samples if sample.finish is None]

    def _read(self, deltas: list[SampleDelta]) -> list[SampleDelta]:
        for delta in deltas:
            self._num_tokens_read[delta.sample] += len(delta.token_ids)
            self._num_unread -= delta.finish is not None
            if self._parsers is not None:
                self._count_parts(delta, self._parsers[delta.sample])
        return deltas

    def _count_parts(self, delta: SampleDelta, parser: AnswerParser) -> None:
        self._reasoning[delta.sample].count(
            delta.token_ids, has_reasoned=parser.has_reasoned, has_called=parser.has_called
        )
        if delta.finish is not None:
            self._count_calls(has_calls=parser.has_called)

    def _count_calls(self, *, has_calls: bool) -> None:
        if self.request.tool_use is not None:
            generation_metrics.tools_offered(self._metrics, streamed=not self.request.final_only, called=has_calls)

    async def collect(self) -> list[SampleDelta]:
        """Of a request that is final_only: a delta for each sample."""
        deltas = [delta async for news in self for delta in news]
        return sorted(deltas, key=lambda delta: delta.sample)

    @property
    def vectors(self) -> list[bytes]:
        """Of a request with pooling that has ended: an f32 column for each prompt. Raises Internal without one."""
        return [*map(self.vector, range(len(self._samples)))]

    def vector(self, prompt: int) -> bytes:
        """Of one that has ended."""
        found = self._samples[prompt].vector
        if not found:
            raise Internal("a prompt ended without its vector")
        return found

    @property
    def num_vectors(self) -> list[int] | None:
        """In each of these columns; None: one, of all tokens."""
        counts = [prompt.num_vectors for prompt in self.prepared if prompt.num_vectors is not None]
        return counts or None

    @property
    def usage(self) -> Usage:
        """Over all prompts and samples."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prepared)
        reasoning_tokens = sum(count.num_tokens for count in self._reasoning)
        return Usage(prompt_tokens, sum(self._num_tokens_read), sum(self._cached_tokens.values()), reasoning_tokens)

    def sample_usage(self, index: int) -> Usage:
        """Of one sample and its prompt."""
        prompt = index // self.request.sampling.n
        num_prompt_tokens = self.prepared[prompt].num_tokens
        reasoning_tokens = self._reasoning[index].num_tokens if self._reasoning else 0
        cached_tokens = self._cached_tokens.get(prompt, 0)
        return Usage(num_prompt_tokens, self._num_tokens_read[index], cached_tokens, reasoning_tokens)

    @property
    def times(self) -> Times:
        first_s = min((sample.first_token_s for sample in self._samples if sample.num_tokens), default=None)
        return Times(self._queue_s, None if first_s is None else first_s - self.request.arrival_s)

    def sample_times(self, index: int) -> Times:
        sample = self._samples[index]
        if not sample.num_tokens:
            return Times(self._queue_s, None)
        first_s = sample.first_token_s
        return Times(self._queue_s, first_s - self.request.arrival_s, sample.last_token_s - first_s)

    @property
    def latency(self) -> LatencyBreakdown:
        if not self._samples:  # a request for nothing
            return LatencyBreakdown(self._submitted_s, self._queue_s, None, None, None)
        sample = self._samples[0]
        has_tokens = sample.num_tokens > 0
        return LatencyBreakdown(
            self._submitted_s,
            self._queue_s,
            sample.started_s or None,
            sample.first_token_s if has_tokens else None,
            sample.last_token_s if has_tokens else None,
        )

    def time_spans(self) -> list[tuple[str, float, float]]:
        """Of its budget, up to now."""
        return self.latency.spans(self.request.arrival_s, self._loop.time())

    @property
    def finish_reasons(self) -> str:
        """Of its samples, each once; those that the reader left alone are cancelled."""
        return ",".join(dict.fromkeys(generation_metrics.finish_reason_name(sample.finish) for sample in self._samples))

    def on_start(self, sample: Sample, num_cached_tokens: int, queue_us: int) -> None:
        sample.started_s = self._loop.time()
        if self._queue_s is None:
            self._queue_s = queue_us / 1e6
        self._metrics.queue_time.observe(queue_us / 1e6)
        prompt = sample.index // self.request.sampling.n
        if prompt not in self._cached_tokens:
            self._cached_tokens[prompt] = num_cached_tokens
            generation_metrics.prompt_started(self._metrics, self.prepared[prompt], num_cached_tokens)

    def on_first_token(self, sample: Sample, now: float) -> None:
        self._metrics.time_to_first_token.observe(now - self.request.arrival_s)

    def on_done(self, sample: Sample, end: SequenceEnd, now: float) -> None:
        if end.error is not None:
            self._fail(end.error, finish_pb2.FINISH_REASON_CANCELLED)
        if end.finish.stop_string is not None:
            self._metrics.cancellations["stop_string"].inc()
        self._count(sample, end.finish.reason, now, end.num_preemptions)
        if end.error is not None:
            self._count_unfinished(finish_pb2.FINISH_REASON_CANCELLED, "failed")
        elif self._slots is not None and not self._num_unfinished[sample.index // self.request.sampling.n]:
            self._loop.call_soon(self._begin_others)  # not within the reading of a scheduler's message

    def _count(self, sample: Sample, reason: FinishReason, now: float, num_preemptions: int = 0) -> None:
        generation_metrics.sample_ended(self._metrics, sample, reason, self.request.arrival_s, now)
        self._metrics.request_num_preemptions.observe(num_preemptions)
        n = self.request.sampling.n
        prompt = sample.index // n
        self._num_unfinished[prompt] -= 1
        if not self._num_unfinished[prompt]:
            generation_metrics.prompt_ended(
                self._metrics, self.prepared[prompt], self._samples[prompt * n : prompt * n + n]
            )

    def abort(self) -> None:
        """Ends what still runs; the reader hears Aborted behind what was ready."""
        reason = finish_pb2.FINISH_REASON_CANCELLED
        self._fail(Aborted("aborted"), reason)
        self._count_unfinished(reason, "cancelled")

    def _expire(self) -> None:
        self._fail(DeadlineExceeded("the deadline passed"), finish_pb2.FINISH_REASON_DEADLINE)
        self._count_unfinished(finish_pb2.FINISH_REASON_DEADLINE, "deadline")

    def _fail(self, error: QuireError, reason: FinishReason) -> None:
        """The reader hears of it first, whatever happens to the rest."""
        self._is_over = True
        self._mailbox.fail(error)
        self._client.cancel(self._sequences, reason)
        if isinstance(error, ResourceExhausted):
            self._metrics.rejections["scheduler"].inc()

    def _count_unfinished(self, reason: FinishReason, counted_as: str) -> None:
        unwanted = [sample for sample in self._samples if not sample.done]
        self._metrics.cancellations[counted_as].inc(len(unwanted))
        for sample in unwanted:
            sample.done = True
            self._count(sample, reason, self._loop.time())

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        """Nobody reads on: what still runs is cancelled."""
        late = self._is_late()
        reason = finish_pb2.FINISH_REASON_DEADLINE if late else finish_pb2.FINISH_REASON_CANCELLED
        self._close(reason)
        self._count_unfinished(reason, "deadline" if late else "cancelled")

    def _close(self, reason: FinishReason) -> None:
        """Gives back what schedulers, timers and the pace of the writers hold for it."""
        self._is_over = True
        self._client.cancel(self._sequences, reason)
        if self._deadline is not None:
            self._deadline.cancel()
        self._mailbox.close()

    def _is_late(self) -> bool:
        deadline_s = self.request.deadline_s
        return deadline_s is not None and self._loop.time() > deadline_s - CLIENT_CLOCK_S


def _silent_tokens(sampling: Sampling, tokenizer: Tokenizer) -> frozenset[int]:
    if sampling.include_stop_str_in_output:
        return frozenset()
    return frozenset(tokenizer.eos_ids).union(sampling.stop_token_ids)
