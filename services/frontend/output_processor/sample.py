"""Samples of a prompt: their texts, their times, and the mailbox that holds their output until the reader takes it."""

from __future__ import annotations

import asyncio
import sys
from typing import Protocol

from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.output_processor.sample_text import SampleText
from quire.services.frontend.output_processor.wakeup_pacer import WakeupPacer
from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.services.frontend.scheduler_client.sequence import SequenceEnd
from quire.shared.errors import QuireError
from quire.shared.metrics.frontend import TokenTraffic
from quire.shared.pb.common.v1.finish_pb2 import FINISH_REASON_STOP

AT_END = sys.maxsize  # no output before the sample's end


class SampleOwner(Protocol):
    """Generation that a sample belongs to."""

    def on_start(self, sample: Sample, num_cached_tokens: int, queue_us: int, encode_us: int) -> None:
        """Called when the sequence has left the scheduler's queue."""

    def on_first_token(self, sample: Sample, now: float) -> None:
        """Called when the sample has its first token."""

    def on_done(self, sample: Sample, end: SequenceEnd, now: float) -> None:
        """Called when the sample has ended."""


class Sample:
    """Output sink of one sequence. The hot path: on_tokens runs once per step and sample."""

    __slots__ = (
        "_detokenizer",
        "_due",
        "_finish",
        "_has_failed",
        "_hidden_stop_ids",
        "_interval",
        "_is_posted",
        "_logprobs",
        "_mailbox",
        "_owner",
        "_prompt_logprobs",
        "_text",
        "_token_ids",
        "_traffic",
        "done",
        "first_token_s",
        "index",
        "last_token_s",
        "num_tokens",
        "started_s",
        "vector",
        "weight_version",
    )

    def __init__(
        self,
        index: int,
        words: SampleText,
        *,
        hidden_stop_ids: frozenset[int],
        mailbox: Mailbox,
        traffic: TokenTraffic,
        owner: SampleOwner,
        interval: int,
    ) -> None:
        """Creates a sample without output.

        `hidden_stop_ids`: stop tokens whose text is not emitted; `interval`: tokens per delta, or AT_END.
        """
        self.index = index
        self.done = False
        self.weight_version = ""
        self.vector = b""  # f32 column of a pooled sequence, in place of tokens
        self.num_tokens = 0
        self.started_s = self.first_token_s = self.last_token_s = 0.0
        self._detokenizer = words
        self._hidden_stop_ids = hidden_stop_ids
        self._mailbox = mailbox
        self._traffic = traffic
        self._owner = owner
        self._interval = interval
        self._due = AT_END if interval == AT_END else 1  # number of tokens at which output is posted
        self._is_posted = False
        self._token_ids: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._finish: Finish | None = None
        self._has_failed = False

    @property
    def finish(self) -> Finish | None:
        """How the sample ended; None while it runs."""
        return self._finish

    def on_start(self, num_cached_tokens: int, queue_us: int, encode_us: int) -> None:
        self._owner.on_start(self, num_cached_tokens, queue_us, encode_us)

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Stores the log-probabilities, which are sent with the first token."""
        self._prompt_logprobs += logprobs

    def on_vector(self, values: bytes) -> None:
        self.vector = values

    def on_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], end: SequenceEnd | None, now: float
    ) -> bool:
        """Adds the scheduler's tokens, and `end` if they are the last ones, and posts the output if it is due.
        Returns whether a stop string ended the sample, of which the scheduler does not know."""
        hide_last = (
            end is not None and end.finish.reason == FINISH_REASON_STOP and token_ids[-1] in self._hidden_stop_ids
        )
        text, num_tokens, stop = self._detokenizer.push(token_ids, hide_last)
        self._token_ids += token_ids[:num_tokens]
        self._logprobs += logprobs[:num_tokens]
        self._text += text
        self._record_times(num_tokens, now)
        if stop is not None:
            finish = Finish(FINISH_REASON_STOP, stop_string=stop)
            self._end(SequenceEnd(finish) if end is None else end._replace(finish=finish), now)
        elif end is not None:
            self.on_end(end, now)
        if self.done or self.num_tokens >= self._due:
            self._post()
        return stop is not None

    def restore(self, delta: SampleDelta, now: float) -> None:
        """Adds output that another frontend has already sent: processed as at first, but neither counted nor timed
        again."""
        end = delta.finish
        hide_last = end is not None and end.reason == FINISH_REASON_STOP and delta.token_ids[-1:] != []
        hide_last = hide_last and delta.token_ids[-1] in self._hidden_stop_ids
        text, _, stop = self._detokenizer.push(delta.token_ids, hide_last)
        if end is not None and stop is None:
            text += self._detokenizer.flush().text
        self._text += text
        self._token_ids += delta.token_ids
        self._logprobs += delta.logprobs
        self._prompt_logprobs += delta.prompt_logprobs
        if not self.num_tokens:
            self.started_s = self.first_token_s = now
        self.last_token_s = now
        self.num_tokens += len(delta.token_ids)
        if end is not None:
            self.done, self._finish, self.weight_version = True, end, end.weight_version
        self._post()

    def _record_times(self, num_tokens: int, now: float) -> None:
        """Records token times and counts; the first token is reported to the owner, later ones as gaps between
        tokens."""
        if self.num_tokens:
            self._traffic.observe_gap(now - self.last_token_s)
        else:
            self.first_token_s = now
            self._owner.on_first_token(self, now)
        self.last_token_s = now
        self.num_tokens += num_tokens
        self._traffic.generated += num_tokens

    def on_end(self, end: SequenceEnd, now: float) -> None:
        """Ends the sample: adds the text that the detokenizer held back, and puts the sample into the mailbox. A stop
        string in that text replaces the finish of `end`. With an error, held text is dropped and no output is posted:
        the owner passes the error to the reader."""
        if end.error is not None:  # the reader gets the error in place of a finish
            self._end(end, now)
            return
        text, _, stop = self._detokenizer.flush()
        self._text += text
        stopped = end if stop is None else end._replace(finish=Finish(FINISH_REASON_STOP, stop_string=stop))
        self._end(stopped, now)
        self._post()

    def _end(self, end: SequenceEnd, now: float) -> None:
        """Marks the sample as done or failed and reports its end to the owner."""
        self.done = True
        self._finish = end.finish
        self._has_failed = end.error is not None
        self._owner.on_done(self, end, now)

    def _post(self) -> None:
        if not self._is_posted:
            self._is_posted = True
            self._mailbox.put(self)

    def take_delta(self) -> SampleDelta:
        """Returns the output since the last delta and clears it; the next one is due after `stream_interval` tokens.
        A failed sample has no finish, since the mailbox raises its error."""
        prompt_logprobs = self._prompt_logprobs
        finish = None if self._has_failed else self._finish  # the mailbox raises the error after the last output
        if finish is not None:
            finish = finish._replace(weight_version=self.weight_version)
        parts = self._detokenizer.take_parts()
        delta = SampleDelta(self.index, self._token_ids, self._text, self._logprobs, finish, parts, prompt_logprobs)
        self._is_posted = False
        self._due = self.num_tokens + self._interval
        self._token_ids, self._text, self._logprobs, self._prompt_logprobs = [], "", [], []
        return delta


class Mailbox:
    """Outputs of a request between one writer and one reader; holds at most one delta per sample, however slow the
    reader."""

    __slots__ = ("_error", "_is_wakeup_requested", "_pacer", "_reader", "is_late", "ready", "round", "woken_s")

    def __init__(self, pacer: WakeupPacer) -> None:
        self._pacer = pacer
        self.ready: list[Sample] = []
        self._reader: asyncio.Future[None] | None = None
        self._is_wakeup_requested = False
        self._error: QuireError | None = None
        self.round, self.woken_s = 0, 0.0
        self.is_late = False

    def put(self, output: Sample) -> None:
        """Adds a sample that has its first output since its last delta was taken."""
        self.ready.append(output)
        if self._reader is not None and not self._is_wakeup_requested:
            self._is_wakeup_requested = True
            self._pacer.request_wakeup(self)

    def fail(self, error: QuireError) -> None:
        """Ends the mailbox: the reader gets what is pending, then the first error reported."""
        self._error = self._error or error
        self.wake()

    def wake(self) -> bool:
        """Wakes the waiting reader; returns False if no reader waits or it was cancelled."""
        reader, self._reader = self._reader, None
        if reader is None or reader.done():
            return False
        reader.set_result(None)
        return True

    async def next_deltas(self) -> list[SampleDelta]:
        """Waits for output of at least one sample and returns it as take_pending(); must not be called after all
        samples have finished."""
        self._pacer.reader_done(self)
        if self._error is None:
            self._reader = asyncio.get_running_loop().create_future()
            self._is_wakeup_requested = bool(self.ready)
            if self._is_wakeup_requested:
                self._pacer.request_wakeup(self)
            await self._reader
        return self.take_pending()

    def take_pending(self) -> list[SampleDelta]:
        """Returns and clears the output of all samples without waiting, for readers that never call `next_deltas`.
        Raises the generation's error after the last output."""
        if not self.ready and self._error is not None:
            raise self._error
        ready, self.ready = self.ready, []
        return [output.take_delta() for output in ready]

    def close(self) -> None:
        """Removes the reader from the wakeup pacer."""
        self._pacer.reader_done(self)
