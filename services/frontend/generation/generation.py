"""One accepted request until its end: its samples, its deadline, and the deltas for its reader."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq

from quire.services.frontend.bounds.bodies.heavy_work import leave_turns
from quire.services.frontend.calls.measurements import LatencyBreakdown, Times, Usage
from quire.services.frontend.generation import generation_metrics
from quire.services.frontend.generation.ports import PromptSlots, Submitter
from quire.services.frontend.input_processor.prepared_prompt import PreparedPrompt
from quire.services.frontend.media.stage_clock import MediaTimes
from quire.services.frontend.output_processor.answer_formats import AnswerFormats
from quire.services.frontend.output_processor.answer_parser import AnswerParser
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.detokenizer import PROMPT_END
from quire.services.frontend.output_processor.reasoning_tokens import ReasoningTokenCounter
from quire.services.frontend.output_processor.sample import AT_END, Mailbox, Sample
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

TOKENS_IN_A_TURN = 8_192  # submitted before the event loop is left to others; hashing and submitting them takes 1 ms
PER_SAMPLE_COST_TOKENS = 256  # cost of submitting a sample in addition to its prompt, in tokens
CLIENT_CLOCK_S = 0.1  # a client cancels at its own deadline, up to this much before the server's


class Aborted(QuireError):
    """The reader's error after abort(): an authorized party ended the request while it ran."""


class Generation:
    """Runs a request. Use it in a `with`, call begin(), then iterate for lists of deltas until every sample has
    finished or an error is raised. Leaving the `with` cancels what still runs."""

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
        media: MediaTimes | None = None,
    ) -> None:
        """Creates the samples and sequences; nothing is submitted before begin(). `prepared`: tokenized prompts;
        `pace`: groups wake-ups of the reader; `media`: time that was spent on the media of the prompts."""
        self.request = request
        self.prepared = prepared
        self._client = client
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._mailbox = Mailbox(pace)
        hidden = _hidden_stop_ids(request.sampling, tokenizer)
        self._parsers = formats.parsers(request, prepared) if request.parse_answer else None
        shown = formats.visible_tokens(request) if request.parse_answer else frozenset()
        self._samples = [self._new_sample(index, tokenizer, hidden, shown) for index in range(request.num_samples)]
        self._sequences = [self._new_sequence(sample) for sample in self._samples]
        self._num_unread = len(self._samples)
        self._num_unfinished = [request.sampling.n] * len(prepared)  # samples, by prompt
        self._cached_tokens: dict[int, int] = {}  # by prompt; of its first sample to start
        self._queue_s: float | None = None
        self._media, self._encode_s = media, 0.0
        self._submitted_s: float | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._resumes = False
        self._is_over = False  # no further prompts are submitted
        self._cached: Seq[CachedTokens] = ()
        self._slots: PromptSlots | None = None
        self._num_begun = 0  # prompts
        self._num_tokens_read = [0] * len(self._samples)
        self._reasoning = (
            [ReasoningTokenCounter(formats.end_of_reasoning) for _ in self._samples] if self._parsers else []
        )

    def _new_sample(self, index: int, tokenizer: Tokenizer, hidden: frozenset[int], shown: frozenset[str]) -> Sample:
        """Returns the sample with this index; samples of one prompt have consecutive indexes. `hidden`: stop
        tokens whose text is not emitted; `shown`: special tokens that the text keeps."""
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
            hidden_stop_ids=hidden,
            mailbox=self._mailbox,
            traffic=self._metrics.traffic,
            owner=self,
            interval=AT_END if self.request.final_only else self.request.stream_interval,
        )

    def _new_sequence(self, sample: Sample) -> Sequence:
        prompt, number = divmod(sample.index, self.request.sampling.n)
        return Sequence(self.prepared[prompt].prompt_request, number, sample)

    def restore(self, delta: SampleDelta) -> list[SampleDelta]:
        """Restores a delta of a stream that another frontend started, for a request with one prompt; the delta has no
        text. Called before begin(). Returns the delta with its text."""
        sample, sequence = self._samples[delta.sample], self._sequences[delta.sample]
        self._resumes = True
        sample.restore(delta, self._loop.time())
        sequence.tokens.extend(delta.token_ids)
        sequence.num_prompt_logprobs += len(delta.prompt_logprobs)
        if delta.finish is not None:
            sequence.is_active = False
            self._num_unfinished[delta.sample // self.request.sampling.n] -= 1
        return self.take_pending()

    async def begin(self, cached: Seq[CachedTokens], slots: PromptSlots | None = None) -> None:
        """Starts the deadline and submits the prompts, with turns of the event loop for others in between. A restored
        generation submits its unfinished samples. `cached`: per prompt, tokens cached by scheduler. `slots`: if given,
        only that many samples start now and further prompts as others end."""
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
                await leave_turns()

    def _submit(self, prompt: int) -> None:
        """Submits all samples of the prompt with this index."""
        n = self.request.sampling.n
        self._client.submit(self._sequences[prompt * n : prompt * n + n], self._cached[prompt])

    def _start_next_prompts(self) -> None:
        """Submits the prompts that may start after one has ended; does nothing once the request is over."""
        if self._is_over or self._slots is None:
            return
        left = len(self.prepared) - self._num_begun
        for _ in range(self._slots.start_next_prompts(self.request.sampling.n, left)):
            self._num_begun += 1
            self._submit(self._num_begun - 1)

    def __aiter__(self) -> Generation:
        return self

    async def __anext__(self) -> list[SampleDelta]:
        """Waits for the next deltas of any samples. Raises the error that ended the request."""
        if not self._num_unread:
            raise StopAsyncIteration
        return self._read(await self._mailbox.next_deltas())

    def take_pending(self) -> list[SampleDelta]:
        """Returns the pending deltas without waiting."""
        return self._read(self._mailbox.take_pending())

    @property
    def num_unread(self) -> int:
        """Number of samples whose end has not been read."""
        return self._num_unread

    @property
    def unfinished_samples(self) -> list[int]:
        """Indexes of samples that have not finished by themselves."""
        return [sample.index for sample in self._samples if sample.finish is None]

    def _read(self, deltas: list[SampleDelta]) -> list[SampleDelta]:
        """Counts the tokens, ends, reasoning and tool calls of deltas that the reader gets, and returns the deltas."""
        for delta in deltas:
            self._num_tokens_read[delta.sample] += len(delta.token_ids)
            self._num_unread -= delta.finish is not None
            if self._parsers is not None:
                self._count_parts(delta, self._parsers[delta.sample])
        return deltas

    def _count_parts(self, delta: SampleDelta, parser: AnswerParser) -> None:
        """Counts the delta's tokens as reasoning or answer and, at the sample's end, whether it called a tool."""
        self._reasoning[delta.sample].count(
            delta.token_ids, has_reasoned=parser.has_reasoned, has_called=parser.has_called
        )
        if delta.finish is not None:
            self._count_calls(has_calls=parser.has_called)

    def _count_calls(self, *, has_calls: bool) -> None:
        """Counts a sample that was offered tools, by whether it called one."""
        if self.request.tool_use is not None:
            generation_metrics.tools_offered(self._metrics, streamed=not self.request.final_only, called=has_calls)

    async def collect(self) -> list[SampleDelta]:
        """Returns one delta per sample, sorted by sample; for requests with final_only."""
        deltas = [delta async for batch in self for delta in batch]
        return sorted(deltas, key=lambda delta: delta.sample)

    @property
    def vectors(self) -> list[bytes]:
        """Vectors of a finished pooling request, an f32 column per prompt. Raises Internal if one is missing."""
        return [*map(self.vector, range(len(self._samples)))]

    def vector(self, prompt: int) -> bytes:
        """Returns the vector of a prompt that has finished. Raises Internal if it is missing."""
        found = self._samples[prompt].vector
        if not found:
            raise Internal("a prompt ended without its vector")
        return found

    @property
    def num_vectors(self) -> list[int] | None:
        """Number of vectors in each column of `vectors`; None: one each, over all tokens."""
        counts = [prompt.num_vectors for prompt in self.prepared if prompt.num_vectors is not None]
        return counts or None

    @property
    def usage(self) -> Usage:
        """Token counts over all prompts and samples, of what the reader has got so far; a prompt counts once, whatever
        n is."""
        prompt_tokens = sum(prompt.num_tokens for prompt in self.prepared)
        reasoning_tokens = sum(count.num_tokens for count in self._reasoning)
        return Usage(prompt_tokens, sum(self._num_tokens_read), sum(self._cached_tokens.values()), reasoning_tokens)

    def sample_usage(self, index: int) -> Usage:
        """Token counts of one sample, as far as read, and of its prompt."""
        prompt = index // self.request.sampling.n
        num_prompt_tokens = self.prepared[prompt].num_tokens
        reasoning_tokens = self._reasoning[index].num_tokens if self._reasoning else 0
        cached_tokens = self._cached_tokens.get(prompt, 0)
        return Usage(num_prompt_tokens, self._num_tokens_read[index], cached_tokens, reasoning_tokens)

    @property
    def times(self) -> Times:
        """Durations of the whole request: queue time of the first sample to start, and the earliest first token."""
        first_s = min((sample.first_token_s for sample in self._samples if sample.num_tokens), default=None)
        return Times(self._queue_s, None if first_s is None else first_s - self.request.arrival_s)

    def sample_times(self, index: int) -> Times:
        """Durations of one sample; without tokens only the queue time, which is that of the first sample to start."""
        sample = self._samples[index]
        if not sample.num_tokens:
            return Times(self._queue_s, None)
        first_s = sample.first_token_s
        return Times(self._queue_s, first_s - self.request.arrival_s, sample.last_token_s - first_s)

    @property
    def latency(self) -> LatencyBreakdown:
        """Times of the request up to now: its media, its queue, and the milestones of sample 0, None if not reached."""
        if not self._samples:  # a request for nothing
            return LatencyBreakdown(self._submitted_s, self._queue_s, None, None, None, self._media)
        sample = self._samples[0]
        first_s, last_s = (sample.first_token_s, sample.last_token_s) if sample.num_tokens else (None, None)
        started_s = sample.started_s or None
        return LatencyBreakdown(
            self._submitted_s, self._queue_s, started_s, first_s, last_s, self._media, self._encode_s
        )

    def time_spans(self) -> list[tuple[str, float, float]]:
        """Returns the spans of the latency breakdown, up to now."""
        return self.latency.spans(self.request.arrival_s, self._loop.time())

    @property
    def finish_reasons(self) -> str:
        """Distinct finish reasons of the samples, comma-separated; unread samples count as cancelled. A sample that
        stopped after a tool call that the client left open has "tool_calls", as in the answer."""
        use, parsers = self.request.tool_use, self._parsers or ()
        called = {index for index, parser in enumerate(parsers) if parser.has_called and not (use and use.name)}
        names = (generation_metrics.finish_reason_name(one.finish, called=one.index in called) for one in self._samples)
        return ",".join(dict.fromkeys(names))

    def on_start(self, sample: Sample, num_cached_tokens: int, queue_us: int, encode_us: int) -> None:
        """Notes that a worker runs the sample. `queue_us`: microseconds in the scheduler's queue; `encode_us`: those of
        them in which its media were encoded. The cached tokens count for the first sample of each prompt."""
        sample.started_s = self._loop.time()
        if self._queue_s is None:
            self._queue_s, self._encode_s = queue_us / 1e6, encode_us / 1e6
        self._metrics.queue_time.observe(queue_us / 1e6)
        prompt = sample.index // self.request.sampling.n
        if prompt not in self._cached_tokens:
            self._cached_tokens[prompt] = num_cached_tokens
            generation_metrics.prompt_started(self._metrics, self.prepared[prompt], num_cached_tokens)

    def on_first_token(self, sample: Sample, now: float) -> None:
        self._metrics.time_to_first_token.observe(now - self.request.arrival_s)

    def on_done(self, sample: Sample, end: SequenceEnd, now: float) -> None:
        """Counts the end of a sample. An error fails the whole request; else the prompt's last sample lets further
        prompts start."""
        if end.error is not None:
            self._fail(end.error, finish_pb2.FINISH_REASON_CANCELLED)
        if end.finish.stop_string is not None:
            self._metrics.cancellations["stop_string"].inc()
        self._count(sample, end.finish.reason, now, end.num_preemptions)
        if end.error is not None:
            self._count_unfinished(finish_pb2.FINISH_REASON_CANCELLED, "failed")
        elif self._slots is not None and not self._num_unfinished[sample.index // self.request.sampling.n]:
            self._loop.call_soon(self._start_next_prompts)  # after the scheduler's message has been processed

    def _count(self, sample: Sample, reason: FinishReason, now: float, num_preemptions: int = 0) -> None:
        """Records the metrics of an ended sample and, with the last sample of its prompt, of the prompt."""
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
        """Cancels the running samples; the reader gets the ready deltas, then Aborted."""
        reason = finish_pb2.FINISH_REASON_CANCELLED
        self._fail(Aborted("aborted"), reason)
        self._count_unfinished(reason, "cancelled")

    def _expire(self) -> None:
        """Ends the request with DeadlineExceeded and counts its unfinished samples; called by the timer."""
        self._fail(DeadlineExceeded("the deadline passed"), finish_pb2.FINISH_REASON_DEADLINE)
        self._count_unfinished(finish_pb2.FINISH_REASON_DEADLINE, "deadline")

    def _fail(self, error: QuireError, reason: FinishReason) -> None:
        """Delivers the error to the reader, then cancels all sequences; the request is over. Counts a ResourceExhausted
        as a rejection by the scheduler."""
        self._is_over = True
        self._mailbox.fail(error)
        self._client.cancel(self._sequences, reason)
        if isinstance(error, ResourceExhausted):
            self._metrics.rejections["scheduler"].inc()

    def _count_unfinished(self, reason: FinishReason, counted_as: str) -> None:
        """Marks all unfinished samples as done and counts them. `counted_as`: label of the cancellation metric."""
        unwanted = [sample for sample in self._samples if not sample.done]
        self._metrics.cancellations[counted_as].inc(len(unwanted))
        for sample in unwanted:
            sample.done = True
            self._count(sample, reason, self._loop.time())

    def __enter__(self) -> Generation:
        return self

    def __exit__(self, *_: object) -> None:
        """Cancels the samples that have not finished, as expired if the deadline has passed or nearly so, and closes
        the mailbox."""
        is_late = self._is_late()
        reason = finish_pb2.FINISH_REASON_DEADLINE if is_late else finish_pb2.FINISH_REASON_CANCELLED
        self._close(reason)
        self._count_unfinished(reason, "deadline" if is_late else "cancelled")

    def _close(self, reason: FinishReason) -> None:
        """Cancels the sequences and the deadline's timer, and closes the mailbox."""
        self._is_over = True
        self._client.cancel(self._sequences, reason)
        if self._deadline is not None:
            self._deadline.cancel()
        self._mailbox.close()

    def _is_late(self) -> bool:
        """Whether the deadline has passed, or is so close that the client's clock may say so."""
        deadline_s = self.request.deadline_s
        return deadline_s is not None and self._loop.time() > deadline_s - CLIENT_CLOCK_S


def _hidden_stop_ids(sampling: Sampling, tokenizer: Tokenizer) -> frozenset[int]:
    """Returns the stop tokens whose text is not shown; empty if the request includes stop texts in the output."""
    if sampling.include_stop_str_in_output:
        return frozenset()
    return frozenset(tokenizer.eos_ids).union(sampling.stop_token_ids)
