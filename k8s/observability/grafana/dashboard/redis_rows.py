"""Panels about Redis: availability, published blocks and lookups."""

from __future__ import annotations

from panels import EVERYTHING, Panel, Query, average, curves, quantiles, stat

ROWS: dict[str, list[Panel]] = {
    "Redis, now": [
        stat(
            "Schedulers that have it",
            [Query("sum(quire_scheduler_redis_up)", "")],
            text="Redis answered them the last time. 0 also where none is used.",
            red_below=1,
        ),
        stat(
            "Frontends that have it",
            [Query("sum(quire_frontend_redis_up)", "")],
            text="The same of frontends.",
            red_below=1,
        ),
        stat(
            "Blocks published",
            [Query("sum(quire_scheduler_index_entries)", "")],
            text="KV blocks that other schedulers' frontends can find.",
        ),
        stat(
            "Behind by",
            [Query("max(quire_scheduler_index_lag_seconds)", "")],
            text="Age of the oldest change that is not published; at most 0.05 s where all is well.",
            unit="s",
            red_from=5,
        ),
    ],
    "The prefix index": [
        curves(
            "Blocks published, over time",
            [Query("quire_scheduler_index_entries", "{{instance}}")],
            text="Of each scheduler's workers.",
        ),
        curves(
            "Lag",
            [Query("quire_scheduler_index_lag_seconds", "{{instance}}")],
            text="Age of the oldest change that is not published. It grows while Redis is away; serving goes on.",
            unit="s",
        ),
        curves(
            "Failures",
            [
                Query("rate(quire_scheduler_redis_errors_total[$__rate_interval])", "scheduler {{instance}}"),
                Query("rate(quire_frontend_access_errors_total[$__rate_interval])", "keys {{instance}}"),
            ],
            text="Attempts to reach Redis that failed, a second; of frontends those for API keys and their use.",
        ),
        curves(
            "Published again",
            [Query("increase(quire_scheduler_index_republished_total[$__rate_interval])", "{{instance}}")],
            text="Whole caches of workers: when they attach, and after Redis was away.",
        ),
        curves(
            "Look-ups",
            [
                Query(
                    "sum by (outcome) (rate(quire_frontend_prefix_lookups_total[$__rate_interval]))",
                    "{{outcome}}",
                )
            ],
            text="Prompts whose cached prefix was to be looked up, by what came of it. Skipped: there is one scheduler, or too many wait.",
            unit="reqps",
            stacked=True,
        ),
        curves(
            "Time of a look-up",
            [
                average("quire_frontend_prefix_lookup_seconds", selector=EVERYTHING),
                *quantiles("quire_frontend_prefix_lookup_seconds", 0.5, 0.99, selector=EVERYTHING),
            ],
            text="What it took of a request's time; it is cut off at its budget.",
            unit="s",
        ),
    ],
}
