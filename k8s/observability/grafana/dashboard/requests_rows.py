"""Panels about requests as clients observe them."""

from __future__ import annotations

from panels import Panel, Query, average, curves, heatmap, quantiles, stat

ROWS: dict[str, list[Panel]] = {
    "Now": [
        stat(
            "Workers attached",
            [Query("count(quire_scheduler_blocks_used) or vector(0)", "")],
            text="Workers that a scheduler assigns sequences to.",
            red_below=1,
        ),
        stat("Sequences running", [Query("sum(vllm:num_requests_running{MODEL})", "")]),
        stat("Sequences waiting", [Query("sum(vllm:num_requests_waiting{MODEL})", "")]),
        stat(
            "Tokens per second",
            [Query("sum(quire_scheduler_tokens_per_second{MODEL})", "")],
            text="Tokens generated per second, as counted by the schedulers.",
        ),
        stat(
            "Prefix hits",
            [
                Query(
                    "sum(rate(vllm:prefix_cache_hits_total{MODEL}[5m])) / sum(rate(vllm:prefix_cache_queries_total{MODEL}[5m]))",
                    "",
                )
            ],
            text="Share of prompt tokens found in the prefix cache.",
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
            text="Time in the scheduler's queue before the first step.",
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
            text="Per sample: from leaving the queue to its first token, and from there to its last.",
            unit="s",
        ),
        curves(
            "Max Generation Token in Sequence Group",
            [
                *quantiles("vllm:request_max_num_generation_tokens", 0.99, 0.95, 0.9, 0.5),
                average("vllm:request_max_num_generation_tokens"),
            ],
            text="Output tokens of a request's longest sample.",
        ),
    ],
}
