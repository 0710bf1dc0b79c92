"""Metrics of an ended call: outcome per tenant, and where its time went."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from quire.services.frontend.calls.measurements import MeasuredGeneration
from quire.shared.errors import ResourceExhausted, truncated_name
from quire.shared.metrics.calls import CallMetrics, TenantMetrics

if TYPE_CHECKING:
    from quire.services.frontend.calls.calls import Call


def observe_call(metrics: CallMetrics, call: Call) -> None:
    """Records the outcome, token counts and times of an ended call; a detached call is not counted as a call."""
    tenant = metrics.tenant(_tenant(call))
    if not call.is_detached:
        tenant.calls[_outcome(call)] += 1
    if call.generation is not None:
        _count_tokens(tenant, call.generation)
        _observe_times(metrics, call.generation, call.started_s)


def _tenant(call: Call) -> str:
    """Returns the tenant by API key, or as the request states it if there are no keys."""
    if call.caller is not None:
        return call.caller.key.tenant
    return "" if call.request is None else truncated_name(call.request.tenant)


def _outcome(call: Call) -> str:
    """Returns the metric label of the call's end: limited, failed, answered, or left (the client disconnected)."""
    if isinstance(call.error, ResourceExhausted):
        return "limited"
    if call.error is not None:
        return "failed"
    return "answered" if call.status.startswith(("2", "OK")) else "left"


def _count_tokens(tenant: TenantMetrics, generation: MeasuredGeneration) -> None:
    """Adds the generation's tokens and its time to the first token to the tenant's metrics."""
    usage, first_token_s = generation.usage, generation.times.first_token_s
    tenant.tokens["prompt"] += usage.prompt_tokens
    tenant.tokens["cached"] += usage.cached_tokens
    tenant.tokens["output"] += usage.completion_tokens
    if first_token_s is not None:
        tenant.first_token.observe(first_token_s)


def _observe_times(metrics: CallMetrics, generation: MeasuredGeneration, started_s: float) -> None:
    """Observes the spans of the first sample, as in traces; queue time and hop time split the trace's schedule span,
    and that of encoding."""
    budget = generation.latency
    if budget.queue_s is not None and budget.hop_s is not None:
        metrics.parts["queue"].observe(budget.queue_s)
        metrics.parts["hop"].observe(budget.hop_s)
    for name, begin_s, end_s in budget.spans(started_s, asyncio.get_running_loop().time()):
        if name in metrics.parts:
            metrics.parts[name].observe(end_s - begin_s)
