"""Timings of requests as a client observed them, and statistics over them."""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.bench.measuring.percentiles import spread_ms

RANKS = (0.5, 0.9, 0.99)

Received = list[tuple[float, bytes]]  # (arrival time, bytes)


@dataclass(slots=True)
class RequestTiming:
    """Timings of one request on the machine's monotonic clock, in seconds, comparable between processes."""

    sent: float
    arrivals: array[float] = field(default_factory=lambda: array("d"))  # arrival times of messages with tokens
    num_tokens: int = 0
    ended: float = 0.0
    error: str = ""

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.ended - self.sent

    def tokens_until(self, moment: float) -> float:
        """Returns the number of tokens received until a time, assuming equally many per message."""
        came = bisect_right(self.arrivals, moment)
        return self.num_tokens * came / len(self.arrivals) if came else 0.0

    @property
    def gaps(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of one load over all clients."""

    begin: float
    num_prompt_tokens: int
    timings: Sequence[RequestTiming]
    client_cpu_shares: Sequence[float]  # CPU use of each client process; 1 is a full core

    @property
    def done(self) -> list[RequestTiming]:
        return [timing for timing in self.timings if not timing.error]

    @property
    def errors(self) -> list[str]:
        return [timing.error for timing in self.timings if timing.error]

    @property
    def wall_s(self) -> float:
        return max(timing.ended for timing in self.timings) - self.begin

    @property
    def num_tokens(self) -> int:
        return sum(timing.num_tokens for timing in self.done)

    def rates(self) -> dict[str, float]:
        """Returns throughput over the whole time, from the first request to the end of the last."""
        wall = self.wall_s
        return {
            "out_tok_s": self.num_tokens / wall,
            "prompt_tok_s": self.num_prompt_tokens / wall,
            "total_tok_s": (self.num_prompt_tokens + self.num_tokens) / wall,
            "req_s": len(self.done) / wall,
            "wall_s": wall,
            "errors": len(self.errors),
            "client_cpu": max(self.client_cpu_shares),
        }

    def full_rate(self, at_once: int) -> float:
        """Returns output tokens/s of streams until fewer than `at_once` of the successful ones are left: without the
        tail of a load, which takes as long as its slowest streams."""
        ends = sorted(timing.ended for timing in self.done)
        until = ends[-min(at_once, len(ends))]
        return sum(timing.tokens_until(until) for timing in self.done) / (until - self.begin)

    def latencies(self) -> dict[str, float]:
        """Returns latencies of streams. `itl`: between two messages of a request; `tpot`: mean per token of a
        request."""
        streams = [timing for timing in self.done if timing.arrivals]
        several = [timing for timing in streams if timing.num_tokens > 1]
        means = [(t.arrivals[-1] - t.arrivals[0]) / (t.num_tokens - 1) for t in several]
        messages = sum(len(timing.arrivals) for timing in streams)
        return {
            **spread_ms("ttft", [timing.ttft for timing in streams], RANKS),
            **spread_ms("itl", [gap for timing in streams for gap in timing.gaps], RANKS),
            **spread_ms("tpot", means, RANKS),
            **spread_ms("e2e", [timing.e2e for timing in streams], RANKS),
            "tok_per_message": self.num_tokens / max(1, messages),
        }
