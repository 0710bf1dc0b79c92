"""Makes the dashboard: `python k8s/observability/grafana/make_dashboard.py` writes dashboards/quire.json.

A row is a list of panels, laid out from left to right; a panel is a title, what it asks, and what it is for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FILE = Path(__file__).parent / "dashboards" / "quire.json"
COLUMNS = 24
MODEL = '{model_name="$model_name"}'  # the selector of most metrics; written {MODEL} in what a panel asks
EVERYTHING = ""
SOURCE = {"type": "prometheus", "uid": "prometheus"}
VARIABLE = "label_values(vllm:prompt_tokens_total, model_name)"


@dataclass(frozen=True, slots=True)
class Query:
    """A curve, and what it is called."""

    expression: str
    legend: str
    form: str = ""


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture."""

    kind: str
    title: str
    queries: Sequence[Query]
    width: int
    height: int
    options: dict[str, Any]
    defaults: dict[str, Any]
    text: str = ""
    unit: str = "short"

    def as_json(self, number: int, x: int, y: int) -> dict[str, Any]:
        targets = []
        for letter, query in zip("ABCDEFGH", self.queries, strict=False):
            expression = query.expression.replace("{MODEL}", MODEL)
            target = {"refId": letter, "expr": expression, "legendFormat": query.legend}
            targets.append({**target, "format": query.form} if query.form else target)
        return {
            "id": number,
            "type": self.kind,
            "title": self.title,
            "description": self.text,
            "datasource": SOURCE,
            "gridPos": {"x": x, "y": y, "w": self.width, "h": self.height},
            "targets": targets,
            "fieldConfig": {"defaults": {"unit": self.unit, **self.defaults}, "overrides": []},
            "options": self.options,
        }


def quantiles(metric: str, *shares: float, selector: str = "{MODEL}") -> Iterable[Query]:
    """Of a histogram."""
    for share in shares:
        rate = f"rate({metric}_bucket{selector}[$__rate_interval])"
        yield Query(f"histogram_quantile({share}, sum by (le) ({rate}))", f"P{share * 100:.0f}")


def average(metric: str, selector: str = "{MODEL}") -> Query:
    """Of a histogram."""
    total, count = (f"sum(rate({metric}_{part}{selector}[$__rate_interval]))" for part in ("sum", "count"))
    return Query(f"{total} / {count}", "average")


def stat(
    title: str,
    queries: Sequence[Query],
    text: str = "",
    unit: str = "short",
    red_below: float | None = None,
    red_from: float | None = None,
) -> Panel:
    """A number."""
    steps: list[dict[str, Any]] = [{"color": "green" if red_below is None else "red", "value": None}]
    if red_below is not None:
        steps.append({"color": "green", "value": red_below})
    if red_from is not None:
        steps.append({"color": "red", "value": red_from})
    options = {
        "colorMode": "value",
        "graphMode": "area",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }
    defaults = {"thresholds": {"mode": "absolute", "steps": steps}}
    return Panel("stat", title, queries, 4, 4, options, defaults, text, unit)


def curves(
    title: str,
    queries: Sequence[Query],
    text: str = "",
    unit: str = "short",
    highest: float | None = None,
    stacked: bool = False,
) -> Panel:
    """Over time."""
    options = {
        "legend": {"showLegend": True, "displayMode": "list", "placement": "bottom", "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }
    custom: dict[str, Any] = {"fillOpacity": 40 if stacked else 5, "showPoints": "never"}
    if stacked:
        custom["stacking"] = {"mode": "normal"}
    bounds: dict[str, Any] = {"min": 0} if highest is None else {"min": 0, "max": highest}
    return Panel("timeseries", title, queries, 8, 8, options, {**bounds, "custom": custom}, text, unit)


def heatmap(title: str, queries: Sequence[Query], text: str = "") -> Panel:
    """Of a histogram's buckets over time."""
    color = {"mode": "scheme", "scheme": "Spectral", "steps": 64, "scale": "exponential", "exponent": 0.5}
    options = {
        "calculate": False,
        "yAxis": {"unit": "short"},
        "color": {**color, "reverse": False},
        "cellGap": 1,
        "tooltip": {"mode": "single", "yHistogram": True},
        "legend": {"show": False},
    }
    shown = [Query(query.expression, query.legend, "heatmap") for query in queries]
    return Panel("heatmap", title, shown, 8, 8, options, {}, text)


ROWS: dict[str, list[Panel]] = {
    "Now": [
        stat(
            "Workers attached",
            [Query("count(quire_scheduler_blocks_used) or vector(0)", "")],
            text="Workers that a scheduler gives work to.",
            red_below=1,
        ),
        stat("Sequences running", [Query("sum(vllm:num_requests_running{MODEL})", "")]),
        stat("Sequences waiting", [Query("sum(vllm:num_requests_waiting{MODEL})", "")]),
        stat(
            "Tokens per second",
            [Query("sum(quire_scheduler_tokens_per_second{MODEL})", "")],
            text="Tokens generated, as the schedulers see it.",
        ),
        stat(
            "Prefix hits",
            [
                Query(
                    "sum(rate(vllm:prefix_cache_hits_total{MODEL}[5m])) / sum(rate(vllm:prefix_cache_queries_total{MODEL}[5m]))",
                    "",
                )
            ],
            text="Share of the prompt tokens found cached.",
            unit="percentunit",
        ),
        stat(
            "Unowned KV blocks",
            [Query("sum(quire_scheduler_blocks_unowned)", "")],
            text="KV blocks in use on workers that have no sequence; always 0, or there is a leak.",
            red_from=1,
        ),
    ],
    "Requests, as clients see them": [
        curves(
            "E2E Request Latency",
            [
                *quantiles("vllm:e2e_request_latency_seconds", 0.99, 0.95, 0.9, 0.5),
                average("vllm:e2e_request_latency_seconds"),
            ],
            text="From arrival to a sample's end.",
            unit="s",
        ),
        curves(
            "Token Throughput",
            [
                Query("sum(rate(vllm:prompt_tokens_total{MODEL}[$__rate_interval]))", "prompt"),
                Query("sum(rate(vllm:generation_tokens_total{MODEL}[$__rate_interval]))", "generation"),
            ],
        ),
        curves(
            "Inter Token Latency",
            [
                *quantiles("vllm:inter_token_latency_seconds", 0.99, 0.95, 0.9, 0.5),
                average("vllm:inter_token_latency_seconds"),
            ],
            text="Between deliveries of tokens of a sample.",
            unit="s",
        ),
        curves(
            "Scheduler State",
            [
                Query("sum(vllm:num_requests_running{MODEL})", "running"),
                Query("sum(vllm:num_requests_waiting{MODEL})", "waiting"),
            ],
        ),
        curves(
            "Time To First Token Latency",
            [
                *quantiles("vllm:time_to_first_token_seconds", 0.99, 0.95, 0.9, 0.5),
                average("vllm:time_to_first_token_seconds"),
            ],
            text="From arrival to a sample's first token.",
            unit="s",
        ),
        curves(
            "Cache Utilization",
            [Query("vllm:kv_cache_usage_perc{MODEL}", "{{engine}}")],
            text="Share of a worker's KV blocks that is owned by sequences.",
            unit="percentunit",
            highest=1,
        ),
        heatmap(
            "Request Prompt Length",
            [Query("sum by (le) (increase(vllm:request_prompt_tokens_bucket{MODEL}[$__rate_interval]))", "{{le}}")],
        ),
        heatmap(
            "Request Generation Length",
            [Query("sum by (le) (increase(vllm:request_generation_tokens_bucket{MODEL}[$__rate_interval]))", "{{le}}")],
        ),
        curves(
            "Finish Reason",
            [
                Query(
                    "sum by (finished_reason) (increase(vllm:request_success_total{MODEL}[$__rate_interval]))",
                    "{{finished_reason}}",
                )
            ],
        ),
        curves(
            "Queue Time",
            [
                Query(
                    "sum(rate(vllm:request_queue_time_seconds_sum{MODEL}[$__rate_interval]))",
                    "seconds of queueing per second",
                ),
                *quantiles("vllm:request_queue_time_seconds", 0.99, 0.9),
                average("vllm:request_queue_time_seconds"),
            ],
            text="In the scheduler's queue before the first step.",
            unit="s",
        ),
        curves(
            "Requests Prefill and Decode Time",
            [
                Query(
                    "sum(rate(vllm:request_prefill_time_seconds_sum{MODEL}[$__rate_interval])) / sum(rate(vllm:request_prefill_time_seconds_count{MODEL}[$__rate_interval]))",
                    "prefill",
                ),
                Query(
                    "sum(rate(vllm:request_decode_time_seconds_sum{MODEL}[$__rate_interval])) / sum(rate(vllm:request_decode_time_seconds_count{MODEL}[$__rate_interval]))",
                    "decode",
                ),
            ],
            text="Per sample: to its first token without the time in the queue, and from there to its last.",
            unit="s",
        ),
        curves(
            "Max Generation Token in Sequence Group",
            [
                *quantiles("vllm:request_max_num_generation_tokens", 0.99, 0.95, 0.9, 0.5),
                average("vllm:request_max_num_generation_tokens"),
            ],
            text="Tokens of a request's longest sample.",
        ),
    ],
    "Where a step's time goes": [
        curves(
            "Step, from plan to result",
            [
                Query(
                    "histogram_quantile(0.99, sum by (le, worker) (rate(quire_scheduler_step_seconds_bucket[$__rate_interval])))",
                    "P99 {{worker}}",
                ),
                Query(
                    "sum by (worker) (rate(quire_scheduler_step_seconds_sum[$__rate_interval])) / sum by (worker) (rate(quire_scheduler_step_seconds_count[$__rate_interval]))",
                    "average {{worker}}",
                ),
            ],
            text="As the scheduler sees it, per worker; two are under way at a time.",
            unit="s",
        ),
        curves(
            "Worker: parts of a step",
            [
                Query(
                    "sum by (phase) (rate(quire_worker_step_phase_seconds_sum[$__rate_interval])) / sum by (phase) (rate(quire_worker_step_phase_seconds_count[$__rate_interval]))",
                    "{{phase}}",
                )
            ],
            text="Average time per step and part.",
            unit="s",
            stacked=True,
        ),
        curves(
            "Scheduler: planning and taking in",
            [
                Query(
                    "sum(rate(quire_scheduler_schedule_seconds_sum[$__rate_interval])) / sum(rate(quire_scheduler_schedule_seconds_count[$__rate_interval]))",
                    "schedule, average",
                ),
                Query(
                    "sum(rate(quire_scheduler_apply_seconds_sum[$__rate_interval])) / sum(rate(quire_scheduler_apply_seconds_count[$__rate_interval]))",
                    "apply, average",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) (rate(quire_scheduler_schedule_seconds_bucket[$__rate_interval])))",
                    "schedule, P99",
                ),
                Query(
                    "histogram_quantile(0.99, sum by (le) (rate(quire_scheduler_apply_seconds_bucket[$__rate_interval])))",
                    "apply, P99",
                ),
            ],
            text="Per step.",
            unit="s",
        ),
        curves(
            "Last step age",
            [
                Query(
                    "quire_scheduler_last_step_age_seconds{MODEL} and vllm:num_requests_running{MODEL} > 0",
                    "{{engine}}, with work",
                ),
                Query(
                    "quire_scheduler_last_step_age_seconds{MODEL} unless vllm:num_requests_running{MODEL} > 0",
                    "{{engine}}, idle",
                ),
            ],
            text="Since a worker's last step ended. It grows while there is no work; with work it must not.",
            unit="s",
        ),
        curves(
            "Tokens per step",
            [
                Query(
                    "sum by (engine) (rate(vllm:iteration_tokens_total_sum[$__rate_interval])) / sum by (engine) (rate(vllm:iteration_tokens_total_count[$__rate_interval]))",
                    "{{engine}}",
                )
            ],
            text="Average size of a step.",
        ),
        curves(
            "Tokens per second of each worker",
            [Query("quire_scheduler_tokens_per_second{MODEL}", "{{engine}}")],
            stacked=True,
        ),
    ],
    "KV blocks and prefix cache": [
        curves(
            "Blocks",
            [
                Query("sum(quire_scheduler_blocks_used{MODEL})", "used"),
                Query("sum(quire_scheduler_blocks_cached{MODEL})", "cached"),
                Query("sum(quire_scheduler_blocks_free{MODEL})", "free"),
            ],
            text="All workers: owned by sequences, free but still to be hit, free.",
            stacked=True,
        ),
        curves(
            "Prefix hits",
            [
                Query(
                    "sum by (engine) (rate(vllm:prefix_cache_hits_total{MODEL}[$__rate_interval])) / sum by (engine) (rate(vllm:prefix_cache_queries_total{MODEL}[$__rate_interval]))",
                    "{{engine}}",
                ),
                Query(
                    "sum(rate(vllm:prefix_cache_hits_total{MODEL}[$__rate_interval])) / sum(rate(vllm:prefix_cache_queries_total{MODEL}[$__rate_interval]))",
                    "all",
                ),
            ],
            text="Share of the prompt tokens found cached.",
            unit="percentunit",
            highest=1,
        ),
        curves(
            "Prompt tokens",
            [
                Query("sum(rate(vllm:prompt_tokens_cached_total{MODEL}[$__rate_interval]))", "cached"),
                Query(
                    "sum(rate(vllm:prompt_tokens_total{MODEL}[$__rate_interval])) - sum(rate(vllm:prompt_tokens_cached_total{MODEL}[$__rate_interval]))",
                    "computed",
                ),
            ],
            text="Found cached, and computed.",
            stacked=True,
        ),
        curves(
            "Preemptions",
            [Query("sum by (engine) (increase(vllm:num_preemptions_total{MODEL}[$__rate_interval]))", "{{engine}}")],
            text="Sequences that lost their blocks and are computed again.",
        ),
        curves(
            "Blocks, as workers see them",
            [
                Query("quire_worker_blocks_used", "used {{instance}}"),
                Query("quire_worker_blocks_held", "held {{instance}}"),
            ],
            text="Owned by live slots, and held after their owners left.",
        ),
        curves(
            "Slots", [Query("quire_worker_slots_live", "{{instance}}")], text="Sequences that have a slot on a worker."
        ),
    ],
    "Parts that die, leave or are full": [
        curves(
            "Cancel to blocks free",
            [
                *quantiles("quire_scheduler_cancel_to_free_seconds", 0.99, 0.9, selector=EVERYTHING),
                average("quire_scheduler_cancel_to_free_seconds", selector=EVERYTHING),
            ],
            text="From a cancellation to its KV blocks being free; at most two steps.",
            unit="s",
        ),
        curves(
            "Workers lost",
            [Query("sum by (reason) (increase(quire_scheduler_workers_lost_total[$__rate_interval]))", "{{reason}}")],
            text="Given up, by reason.",
        ),
        curves(
            "Sequences moved",
            [
                Query("sum(increase(quire_scheduler_sequences_moved_total[$__rate_interval]))", "moved"),
                Query("sum(increase(quire_frontend_resubmitted_sequences_total[$__rate_interval]))", "resubmitted"),
            ],
            text="Taken from a lost or leaving worker by the scheduler; submitted again by frontends.",
        ),
        curves(
            "Sessions",
            [
                Query("quire_frontend_sessions_open", "{{instance}}"),
                Query("count(quire_worker_epoch > 0)", "workers attached"),
            ],
            text="Schedulers that each frontend has a session with; workers attached.",
        ),
        curves(
            "Refused",
            [
                Query(
                    "sum by (reason) (rate(vllm:admission_rejections_total[$__rate_interval]))", "frontend: {{reason}}"
                ),
                Query(
                    "sum by (reason) (rate(quire_scheduler_refused_total[$__rate_interval]))", "scheduler: {{reason}}"
                ),
            ],
            text="Requests refused as too many.",
            unit="reqps",
        ),
        curves(
            "Cancelled",
            [Query("sum by (reason) (rate(quire_frontend_cancellations_total[$__rate_interval]))", "{{reason}}")],
            text="Samples ended before the model ended them.",
            unit="reqps",
        ),
        curves(
            "Broken",
            [
                Query("sum(increase(quire_worker_sessions_broken_total[$__rate_interval]))", "sessions"),
                Query("sum(increase(quire_worker_slot_failures_total[$__rate_interval]))", "sequences"),
            ],
            text="Attachments ended because something was wrong; sequences that a worker could not go on with.",
        ),
        curves(
            "Attachments",
            [Query("sum by (instance) (increase(quire_worker_attached_total[$__rate_interval]))", "{{instance}}")],
            text="Of workers to a scheduler.",
        ),
    ],
    "Frontends": [
        curves(
            "Event loop delay",
            [
                Query(
                    "histogram_quantile(0.99, sum by (le, instance) (rate(quire_frontend_event_loop_delay_seconds_bucket[$__rate_interval])))",
                    "P99 {{instance}}",
                ),
                Query(
                    "sum by (instance) (rate(quire_frontend_event_loop_delay_seconds_sum[$__rate_interval])) / sum by (instance) (rate(quire_frontend_event_loop_delay_seconds_count[$__rate_interval]))",
                    "average {{instance}}",
                ),
            ],
            text="How late a timer fires: what streams wait for the process itself.",
            unit="s",
        ),
        curves(
            "In flight",
            [
                Query("quire_frontend_inflight_requests", "{{instance}}"),
                Query("quire_frontend_waiting_for_scheduler", "waiting for a scheduler {{instance}}"),
            ],
            text="Samples being worked on; submissions that no session can take now.",
        ),
        curves(
            "Tokens promised",
            [Query("quire_frontend_queued_tokens", "{{instance}}")],
            text="Prompt and output tokens of requests in flight.",
        ),
        curves(
            "HTTP answers",
            [Query("sum by (status) (rate(http_requests_total[$__rate_interval]))", "{{status}}")],
            unit="reqps",
            stacked=True,
        ),
        curves(
            "gRPC answers",
            [
                Query(
                    "sum by (method, code) (rate(quire_frontend_grpc_requests_total[$__rate_interval]))",
                    "{{method}} {{code}}",
                )
            ],
            unit="reqps",
            stacked=True,
        ),
        curves(
            "CPU of frontends",
            [Query('rate(process_cpu_seconds_total{job="quire-frontend"}[$__rate_interval])', "cores {{instance}}")],
            text="A frontend is one event loop: at one core it is full.",
        ),
    ],
    "Speculative decoding": [
        curves(
            "Drafts that are right",
            [
                Query(
                    "sum by (engine) (rate(vllm:spec_decode_num_accepted_tokens_total[$__rate_interval])) / sum by (engine) (rate(vllm:spec_decode_num_draft_tokens_total[$__rate_interval]))",
                    "{{engine}}",
                )
            ],
            text="Share of the drafted tokens that the model confirms.",
            unit="percentunit",
        ),
        curves(
            "Tokens per draft",
            [
                Query(
                    "1 + sum by (engine) (rate(vllm:spec_decode_num_accepted_tokens_total[$__rate_interval])) / sum by (engine) (rate(vllm:spec_decode_num_drafts_total[$__rate_interval]))",
                    "{{engine}}",
                )
            ],
            text="Right tokens of a draft, and the one that the model adds.",
        ),
        curves(
            "Length of drafts",
            [Query("quire_scheduler_draft_length", "{{engine}}")],
            text="Most tokens drafted per sequence and step: 0 where drafts do not pay.",
        ),
    ],
    "What the devices do": [
        curves(
            "Model FLOPs utilisation",
            [Query("quire_worker_model_flops_utilisation", "{{instance}}")],
            text="Operations of the steps, by the model's sizes, over what the device could have done; 0 for unknown devices.",
            unit="percentunit",
            highest=1,
        ),
        curves(
            "Memory bandwidth utilisation",
            [Query("quire_worker_model_bandwidth_utilisation", "{{instance}}")],
            text="Weights and KV that the steps read and write, over what the memory could have moved; 0 for unknown devices.",
            unit="percentunit",
            highest=1,
        ),
        curves(
            "Memory traffic",
            [Query("sum by (what) (rate(quire_worker_model_bytes_total[$__rate_interval]))", "{{what}}")],
            text="Bytes that the steps move at least.",
            unit="Bps",
            stacked=True,
        ),
        curves(
            "Operations",
            [Query("sum by (instance) (rate(quire_worker_model_flops_total[$__rate_interval]))", "{{instance}}")],
            text="Floating-point operations that the steps take at least, a second.",
        ),
        curves(
            "Time in steps",
            [Query("rate(quire_worker_step_busy_seconds_total[$__rate_interval])", "{{instance}}")],
            text="Share of the time that a worker's device is at work.",
            unit="percentunit",
            highest=1,
        ),
    ],
}


def document() -> dict[str, Any]:
    return {
        "uid": "quire",
        "title": "Quire",
        "description": "Requests as clients see them, steps, KV blocks, and what happens when parts die.",
        "tags": ["quire", "llm"],
        "schemaVersion": 39,
        "version": 1,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "5s",
        "timezone": "browser",
        "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [_variable()]},
        "annotations": {"list": [_alerts()]},
        "panels": _panels(),
    }


def _variable() -> dict[str, Any]:
    return {
        "name": "model_name",
        "label": "Model",
        "type": "query",
        "datasource": SOURCE,
        "query": {"query": VARIABLE, "refId": "model_name"},
        "definition": VARIABLE,
        "refresh": 2,
        "sort": 1,
        "multi": False,
        "includeAll": False,
    }


def _alerts() -> dict[str, Any]:
    return {
        "name": "Alerts",
        "datasource": SOURCE,
        "enable": True,
        "iconColor": "red",
        "expr": 'ALERTS{alertname=~"Quire.*", alertstate="firing"}',
        "titleFormat": "{{alertname}}",
        "step": "15s",
    }


def _panels() -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    y = 0
    for title, panels in ROWS.items():
        place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
        made.append(
            {"id": len(made) + 1, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        )
        x, y = 0, y + 1
        for panel in panels:
            if x + panel.width > COLUMNS:
                x, y = 0, y + panel.height
            made.append(panel.as_json(len(made) + 1, x, y))
            x += panel.width
        y += panels[-1].height
    return made


if __name__ == "__main__":
    FILE.write_text(json.dumps(document(), indent=1) + "\n")
