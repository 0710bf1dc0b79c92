"""Measurements of one call: token counts, and where its time went."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from quire.services.frontend.media.stage_clock import MediaTimes


class Usage(NamedTuple):
    """Token counts of a request or a sample, of what was delivered to the reader so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0  # part of completion_tokens; 0 if the model has no end-of-reasoning token


class Times(NamedTuple):
    """Durations of a sample in seconds; None if not reached."""

    queue_s: float | None  # in the scheduler's queue, of the first sample to start
    first_token_s: float | None  # from arrival to the first token
    generation_s: float | None = None  # from the first token to the last, of one sample


class LatencyBreakdown(NamedTuple):
    """Milestones of a request's first sample on the event loop's clock, in seconds; None if not reached."""

    submitted_s: float | None  # tokenized and submitted to a scheduler
    queue_s: float | None  # duration in the scheduler's queue, as reported by the scheduler
    started_s: float | None  # the scheduler reported that a worker runs it
    first_token_s: float | None
    last_token_s: float | None
    media: MediaTimes | None = None  # part of the time until submitted_s; None: no media
    encode_s: float = 0.0  # part of queue_s in which a worker encoded the media

    @property
    def hop_s(self) -> float | None:
        """Time between submission and start that was not spent in the scheduler's queue."""
        if self.submitted_s is None or self.started_s is None or self.queue_s is None:
            return None
        return max(0.0, self.started_s - self.submitted_s - self.queue_s)

    def spans(self, arrival_s: float, now: float) -> list[tuple[str, float, float]]:
        """Returns consecutive (name, begin, end) spans: tokenize (including checks and waiting for a turn), schedule
        (transfer and queue), prefill, decode, write (until `now`); with media also fetch and preprocess, placed after
        tokenize, and encode, placed after schedule."""
        ends = (
            *self._preparation_ends(),
            *self._schedule_ends(),
            ("prefill", self.first_token_s),
            ("decode", self.last_token_s),
            ("write", None if self.last_token_s is None else now),
        )
        spans, begin_s = [], arrival_s
        for name, end_s in ends:
            if end_s is None:
                break
            begun_s, begin_s = (
                begin_s,
                max(begin_s, end_s),
            )  # the start may be recorded after the first token of the same message
            spans.append((name, begun_s, begin_s))
        return spans

    def _preparation_ends(self) -> list[tuple[str, float | None]]:
        """Returns the names and ends of the spans until the submission."""
        submitted_s, media = self.submitted_s, self.media
        if submitted_s is None or media is None:
            return [("tokenize", submitted_s)]
        processed_s = submitted_s - media.preprocess_s
        return [("tokenize", processed_s - media.fetch_s), ("fetch", processed_s), ("preprocess", submitted_s)]

    def _schedule_ends(self) -> list[tuple[str, float | None]]:
        """Returns the names and ends of the spans from the submission to the start."""
        started_s = self.started_s
        if started_s is None or self.media is None:
            return [("schedule", started_s)]
        return [("schedule", started_s - self.encode_s), ("encode", started_s)]


class MeasuredGeneration(Protocol):
    """A call's generation, as its log line, span and metrics read it."""

    @property
    def usage(self) -> Usage:
        """Token counts over all samples so far."""

    @property
    def times(self) -> Times:
        """Durations of the first sample to start."""

    @property
    def latency(self) -> LatencyBreakdown:
        """Milestones of the first sample."""

    @property
    def finish_reasons(self) -> str:
        """Finish reasons of the samples, for the log."""
