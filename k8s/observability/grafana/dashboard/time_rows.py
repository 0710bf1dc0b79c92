"""Panels about the time of a request, hop by hop."""

from __future__ import annotations

from panels import EVERYTHING, Panel, Query, average, curves, quantiles

PART = "quire_frontend_request_part_seconds"

ROWS: dict[str, list[Panel]] = {
    "Where a request's time goes": [
        curves(
            "Parts, on average",
            [
                Query(
                    f"sum by (part) (rate({PART}_sum[$__rate_interval])) / sum by (part) (rate({PART}_count[$__rate_interval]))",
                    "{{part}}",
                )
            ],
            text="Tokenize (checks included), the hop to the scheduler and back, its queue, prefill, decode, writing until the call's end.",
            unit="s",
            stacked=True,
        ),
        curves(
            "Parts, one request in twenty",
            [
                Query(
                    f"histogram_quantile(0.95, sum by (le, part) (rate({PART}_bucket[$__rate_interval])))",
                    "P95 {{part}}",
                )
            ],
            text="Which part is slow when a request is slow.",
            unit="s",
        ),
        curves(
            "Until the first token",
            [
                *quantiles("vllm:time_to_first_token_seconds", 0.99, 0.5),
                average("vllm:time_to_first_token_seconds"),
            ],
            text="From arrival.",
            unit="s",
        ),
        curves(
            "In the queue",
            [*quantiles("vllm:request_queue_time_seconds", 0.99, 0.5), average("vllm:request_queue_time_seconds")],
            text="With the scheduler, before the first step. Add workers where it grows.",
            unit="s",
        ),
        curves(
            "Each token after the first",
            [
                *quantiles("vllm:request_time_per_output_token_seconds", 0.99, 0.5),
                average("vllm:request_time_per_output_token_seconds"),
            ],
            text="The mean of a sample.",
            unit="s",
        ),
        curves(
            "Streams' text",
            [
                *quantiles("quire_frontend_detokenize_seconds", 0.99, selector=EVERYTHING),
                average("quire_frontend_detokenize_seconds", selector=EVERYTHING),
                *(
                    Query(query.expression, f"writing, {query.legend}")
                    for query in (
                        *quantiles("quire_frontend_write_seconds", 0.99, selector=EVERYTHING),
                        average("quire_frontend_write_seconds", selector=EVERYTHING),
                    )
                ),
            ],
            text="A step's tokens taken in as text, and written to all streams with news.",
            unit="s",
        ),
    ],
    "Until a token is back": [
        curves(
            "Going on elsewhere",
            [
                Query(query.expression, f"{where}, {query.legend}")
                for where, metric in (
                    ("another worker", "quire_scheduler_migration_seconds"),
                    ("another scheduler", "quire_frontend_migration_seconds"),
                )
                for query in (*quantiles(metric, 0.99, selector=EVERYTHING), average(metric, selector=EVERYTHING))
            ],
            text="From a sequence's last token where it had to leave to its first where it went.",
            unit="s",
        ),
        curves(
            "Scheduler: planning, sending, handing out",
            [
                average("quire_scheduler_schedule_seconds", selector=EVERYTHING),
                Query(average("quire_scheduler_encode_seconds", selector=EVERYTHING).expression, "encode"),
                Query(average("quire_scheduler_return_seconds", selector=EVERYTHING).expression, "return"),
            ],
            text="Of a step; what every token of it waits for.",
            unit="s",
        ),
    ],
}
