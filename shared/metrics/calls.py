"""Metrics per call, counted at its end: where its time went, and totals by tenant."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.shared.metrics.base import STEP_BUCKETS, TTFT_BUCKETS
from quire.shared.metrics.histogram import Histogram, Series

PARTS = ("tokenize", "fetch", "preprocess", "hop", "queue", "encode", "prefill", "decode", "write")
OUTCOMES = ("answered", "limited", "failed", "left")
KINDS = ("prompt", "cached", "output")
MAX_TENANTS = 100  # with their own series: without API keys clients choose their tenant freely
NO_TENANT, OTHER_TENANTS = "(none)", "(others)"
PART_BUCKETS = (*STEP_BUCKETS, 20, 60, 300)


@dataclass(slots=True)
class TenantMetrics:
    """Calls and tokens of one tenant."""

    first_token: Series
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OUTCOMES, 0))
    tokens: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))


class CallMetrics(Collector):
    """Call metrics, written by the event loop and read by the page's thread. `tenant_registry`: holds the series
    that one tenant must not see of another."""

    def __init__(self, registry: CollectorRegistry, tenant_registry: CollectorRegistry) -> None:
        self._tenants: dict[str, TenantMetrics] = {}
        parts = Histogram(
            "quire_frontend_request_part_seconds",
            "Duration of the parts of a request",
            ["part"],
            buckets=PART_BUCKETS,
            registry=registry,
        )
        self.parts = {part: parts.labels(part) for part in PARTS}
        self._first_token = Histogram(
            "quire_frontend_tenant_first_token_seconds",
            "Time from the arrival of a tenant's request to its first token",
            ["tenant"],
            buckets=TTFT_BUCKETS,
            registry=tenant_registry,
        )
        tenant_registry.register(self)

    def tenant(self, name: str) -> TenantMetrics:
        """Returns the metrics of a tenant; tenants beyond the first MAX_TENANTS share one entry."""
        name = name or NO_TENANT
        if name not in self._tenants and len(self._tenants) >= MAX_TENANTS:
            name = OTHER_TENANTS
        found = self._tenants.get(name)
        if found is None:
            found = self._tenants[name] = TenantMetrics(self._first_token.labels(name))
        return found

    def describe(self) -> Iterable[Metric]:
        return []  # the series depend on the tenants seen

    def collect(self) -> Iterable[Metric]:
        """Returns the counters of calls and tokens by tenant, for the page of the tenants' registry."""
        calls = CounterMetricFamily(
            "quire_frontend_tenant_calls", "Calls of a tenant, by outcome", labels=["tenant", "outcome"]
        )
        tokens = CounterMetricFamily("quire_frontend_tenant_tokens", "Tokens of a tenant", labels=["tenant", "kind"])
        for name, tenant in list(self._tenants.items()):
            for outcome, count in tenant.calls.items():
                calls.add_metric([name, outcome], count)
            for kind, count in tenant.tokens.items():
                tokens.add_metric([name, kind], count)
        return calls, tokens
