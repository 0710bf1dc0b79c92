"""Panels about tenants. Without API keys, clients choose their tenant freely."""

from __future__ import annotations

from panels import Panel, Query, curves, stat

CALLS = "quire_frontend_tenant_calls_total"
TOKENS = "quire_frontend_tenant_tokens_total"
FIRST = "quire_frontend_tenant_first_token_seconds"

ROWS: dict[str, list[Panel]] = {
    "Tenants, now": [
        stat(
            "Tenants that called", [Query(f"count(sum by (tenant) ({CALLS}))", "")], text="Since the frontends started."
        ),
        stat(
            "Limited",
            [Query(f'sum(increase({CALLS}{{outcome="limited"}}[1h]))', "")],
            text="Calls of the last hour that were over a limit of their key, or of the cluster.",
        ),
    ],
    "What they ask for": [
        curves(
            "Calls of tenants",
            [Query(f"sum by (tenant) (rate({CALLS}[$__rate_interval]))", "{{tenant}}")],
            unit="reqps",
            stacked=True,
        ),
        curves(
            "Output tokens of tenants",
            [Query(f'sum by (tenant) (rate({TOKENS}{{kind="output"}}[$__rate_interval]))', "{{tenant}}")],
            text="A second.",
            stacked=True,
        ),
        curves(
            "Prompt tokens of tenants",
            [Query(f'sum by (tenant) (rate({TOKENS}{{kind="prompt"}}[$__rate_interval]))', "{{tenant}}")],
            text="A second, cached ones included.",
            stacked=True,
        ),
    ],
    "What they get": [
        curves(
            "How calls end",
            [Query(f"sum by (tenant, outcome) (rate({CALLS}[$__rate_interval]))", "{{tenant}} {{outcome}}")],
            text="Answered; limited: too many, now; failed: refused for what it was, or an error; left: the client did not wait.",
            unit="reqps",
        ),
        curves(
            "First token of tenants",
            [
                Query(
                    f"histogram_quantile(0.95, sum by (le, tenant) (rate({FIRST}_bucket[$__rate_interval])))",
                    "P95 {{tenant}}",
                ),
                Query(
                    f"sum by (tenant) (rate({FIRST}_sum[$__rate_interval])) / sum by (tenant) (rate({FIRST}_count[$__rate_interval]))",
                    "average {{tenant}}",
                ),
            ],
            unit="s",
        ),
        curves(
            "Prefix hits of tenants",
            [
                Query(
                    f'sum by (tenant) (rate({TOKENS}{{kind="cached"}}[$__rate_interval])) / sum by (tenant) (rate({TOKENS}{{kind="prompt"}}[$__rate_interval]))',
                    "{{tenant}}",
                )
            ],
            text="Share of a tenant's prompt tokens found cached.",
            unit="percentunit",
            highest=1,
        ),
    ],
}
