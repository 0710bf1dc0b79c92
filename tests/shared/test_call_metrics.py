"""The number of tenant series is limited, whatever names clients choose."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest

from quire.shared.metrics.calls import MAX_TENANTS, OTHER_TENANTS, CallMetrics


def test_tenants_beyond_the_first_hundred_share_their_series() -> None:
    registry = CollectorRegistry()
    metrics = CallMetrics(CollectorRegistry(), registry)
    for number in range(3 * MAX_TENANTS):
        metrics.tenant(f"tenant-{number}").calls["answered"] += 1
    metrics.tenant("tenant-0").calls["answered"] += 1
    page = generate_latest(registry).decode()
    calls = dict(line.rsplit(" ", 1) for line in page.splitlines() if 'outcome="answered"' in line)
    assert len(calls) == MAX_TENANTS + 1
    assert float(calls[_sample(OTHER_TENANTS)]) == 2 * MAX_TENANTS
    assert float(calls[_sample("tenant-0")]) == 2


def _sample(tenant: str) -> str:
    return f'quire_frontend_tenant_calls_total{{outcome="answered",tenant="{tenant}"}}'
