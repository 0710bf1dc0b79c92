"""Figures of the work of one call: its tokens, and where its time went."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Usage(NamedTuple):
    """Tokens handed to the reader so far."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    reasoning_tokens: int = 0  # of the completion tokens, where a token marks the end of reasoning


class Times(NamedTuple):
    """Seconds; None for what did not come."""

    queue_s: float | None  # of the sample that started first, with the scheduler
    first_token_s: float | None  # since the arrival
    generation_s: float | None = None  # from the first token to the last, of one sample


class LatencyBreakdown(NamedTuple):
    """Where a request's time went, by its first sample: moments of the event loop's clock, seconds; None for what did
    not come."""

    submitted_s: float | None  # tokenized, and on its way to a scheduler
    queue_s: float | None  # seconds that the scheduler says it waited there
    started_s: float | None  # it was told that a worker has it
    first_token_s: float | None
    last_token_s: float | None

    @property
    def hop_s(self) -> float | None:
        """Of the time between submission and start: what was spent outside of the scheduler's queue."""
        if self.submitted_s is None or self.started_s is None or self.queue_s is None:
            return None
        return max(0.0, self.started_s - self.submitted_s - self.queue_s)

    def spans(self, arrival_s: float, now: float) -> list[tuple[str, float, float]]:
        """(name, begin, end) of the parts that there are, one behind the other: tokenize (checks and waiting for a turn
        included), schedule (the way to the scheduler and its queue), prefill, decode, write (until `now`)."""
        ends = (
            ("tokenize", self.submitted_s),
            ("schedule", self.started_s),
            ("prefill", self.first_token_s),
            ("decode", self.last_token_s),
            ("write", None if self.last_token_s is None else now),
        )
        found, begin_s = [], arrival_s
        for name, end_s in ends:
            if end_s is None:
                break
            begun_s, begin_s = begin_s, max(begin_s, end_s)  # a start may be noted after the first token it came with
            found.append((name, begun_s, begin_s))
        return found


class MeasuredGeneration(Protocol):
    """The generation of a call, as far as its log line, its span and its metrics read it."""

    @property
    def usage(self) -> Usage:
        """Tokens of all samples so far."""

    @property
    def times(self) -> Times:
        """Times of the sample that started first."""

    @property
    def latency(self) -> LatencyBreakdown:
        """Where the time of the first sample went."""

    @property
    def finish_reasons(self) -> str:
        """How the samples ended, as the log has it."""
