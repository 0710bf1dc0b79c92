"""The trace span of a request: its time spans, and attributes with OpenTelemetry's and vLLM's names."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.shared.errors import truncated_name
from quire.shared.tracing import Span

if TYPE_CHECKING:
    from quire.services.frontend.calls.calls import Call


def end_span(call: Call, span: Span) -> None:
    """Ends a call's trace span with its attributes and phases; never records any text."""
    now = asyncio.get_running_loop().time()
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.id": truncated_name(call.id),
        "gen_ai.latency.e2e": now - call.started_s,
        "quire.route": call.route,
        "quire.status": call.status,
    }
    if call.request is not None:
        sampling = call.request.sampling
        attributes |= {
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.value("top_p"),
            "gen_ai.request.n": sampling.n,
        }
        if sampling.max_tokens is not None:
            attributes["gen_ai.request.max_tokens"] = sampling.max_tokens
        if call.request.tenant:
            attributes["quire.tenant"] = truncated_name(call.request.tenant)
    if call.generation is not None:
        usage, times = call.generation.usage, call.generation.times
        attributes |= {
            "gen_ai.usage.prompt_tokens": usage.prompt_tokens,
            "gen_ai.usage.completion_tokens": usage.completion_tokens,
            "gen_ai.usage.cached_tokens": usage.cached_tokens,
            "quire.finish_reasons": call.generation.finish_reasons,
        }
        if times.queue_s is not None:
            attributes["gen_ai.latency.time_in_queue"] = times.queue_s
        if times.first_token_s is not None:
            attributes["gen_ai.latency.time_to_first_token"] = times.first_token_s
        for name, begin_s, end_s in call.generation.latency.spans(call.started_s, now):
            span.part(name, begin_s, end_s)
    span.end(now, attributes, "" if call.error is None else type(call.error).__name__)
