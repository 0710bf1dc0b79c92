"""Times of one request in its answer: `metrics`, in vLLM's format of --enable-per-request-metrics."""

from __future__ import annotations

from typing import Any

from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.openai_edge.body.requests import AnswerOptions


def metrics(options: AnswerOptions, generation: Generation) -> dict[str, Any]:
    """Returns the answer's fields with metrics; none if not requested."""
    return {"metrics": _request_times(generation)} if options.metrics else {}


def _request_times(generation: Generation) -> dict[str, float | None] | None:
    """Returns the times of a request with one sample; None for several, since their times differ.

    The spans tokenize, schedule (hop and queue), prefill, decode and write (until now) add up to the time since the
    arrival.
    """
    if generation.request.num_samples > 1:
        return None
    times, num_tokens = generation.sample_times(0), generation.sample_usage(0).completion_tokens
    spent_s = times.generation_s
    more = num_tokens - 1 if spent_s else 0  # tokens after the first, over whose intervals the mean is taken
    return {
        "time_to_first_token_ms": _ms(times.first_token_s),
        "generation_time_ms": _ms(spent_s),
        "queue_time_ms": _ms(times.queue_s),
        "hop_time_ms": _ms(generation.latency.hop_s),
        **{f"{name}_time_ms": _ms(end_s - begin_s) for name, begin_s, end_s in generation.time_spans()},
        "mean_itl_ms": _ms(spent_s / more) if spent_s and more > 0 else None,
        "tokens_per_second": round(more / spent_s, 3) if spent_s and more > 0 else None,
    }


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
