"""Panels about Redis: availability, published blocks and lookups."""

from __future__ import annotations

from panels import EVERYTHING, Panel, Query, average, curves, quantiles, stat

ROWS: dict[str, list[Panel]] = {
    "Redis, now": [
        stat(
            "Schedulers that have it",
            [Query("sum(quire_scheduler_redis_up)", "")],
            text="1 if the last call to Redis succeeded. 0 also without Redis.",
            red_below=1,
        ),
        stat(
            "Frontends that have it",
            [Query("sum(quire_frontend_redis_up)", "")],
            text="The same for frontends.",
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
            text="Age of the oldest unpublished change; at most 0.05 s normally.",
            unit="s",
            red_from=5,
        ),
    ],
    "The prefix index": [
        curves(
            "Blocks published, over time",
            [Query("quire_scheduler_index_entries", "{{instance}}")],
            text="Per scheduler, of its workers.",
        ),
        curves(
            "Lag",
            [Query("quire_scheduler_index_lag_seconds", "{{instance}}")],
            text="Age of the oldest unpublished change. It grows while Redis is unreachable; serving continues.",
            unit="s",
        ),
        curves(
            "Failures",
            [
                Query("rate(quire_scheduler_redis_errors_total[$__rate_interval])", "scheduler {{instance}}"),
                Query("rate(quire_frontend_access_errors_total[$__rate_interval])", "keys {{instance}}"),
            ],
            text="Failed calls to Redis per second; for frontends, those for API keys and their usage.",
        ),
        curves(
            "Published again",
            [Query("increase(quire_scheduler_index_republished_total[$__rate_interval])", "{{instance}}")],
            text="Complete cache snapshots of workers: at attachment, and after Redis was unreachable.",
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
            text="Time the lookup adds to a request; limited by its budget.",
            unit="s",
        ),
    ],
}
