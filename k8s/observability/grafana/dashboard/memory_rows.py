"""Panels about KV memory and prefix cache hits."""

from __future__ import annotations

from panels import Panel, Query, average, curves, quantiles

ROWS: dict[str, list[Panel]] = {
    "KV blocks and prefix cache": [
        curves(
            "Blocks",
            [
                Query("sum(quire_scheduler_blocks_used{MODEL})", "used"),
                Query("sum(quire_scheduler_blocks_cached{MODEL})", "cached"),
                Query("sum(quire_scheduler_blocks_free{MODEL})", "free"),
            ],
            text="KV blocks of all workers: owned by sequences, free but still cached, free and empty.",
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
            text="Share of prompt tokens found in the prefix cache.",
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
            text="Prompt tokens found cached, and prompt tokens computed.",
            stacked=True,
        ),
        curves(
            "Preemptions",
            [Query("sum by (engine) (increase(vllm:num_preemptions_total{MODEL}[$__rate_interval]))", "{{engine}}")],
            text="Preemptions: sequences that lost their blocks and are recomputed.",
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
    "KV in host memory": [
        curves(
            "Blocks in host memory",
            [
                Query("sum by (engine) (quire_scheduler_host_blocks_held{MODEL})", "held {{engine}}"),
                Query("sum by (engine) (quire_scheduler_host_blocks_total{MODEL})", "room {{engine}}"),
            ],
            text="Workers with --kv-offloading-size. Full is normal: the least recently used blocks are evicted.",
        ),
        curves(
            "Blocks moved",
            [
                Query("sum(rate(quire_scheduler_host_blocks_stored_total{MODEL}[$__rate_interval]))", "stored"),
                Query("sum(rate(quire_scheduler_host_blocks_fetched_total{MODEL}[$__rate_interval]))", "brought back"),
                Query("sum(rate(quire_scheduler_transfers_failed_total{MODEL}[$__rate_interval]))", "transfers failed"),
            ],
            text="Blocks per second. Loaded blocks are not recomputed.",
            unit="ops",
        ),
        curves(
            "Time of a transfer",
            [
                average("quire_scheduler_transfer_seconds", ""),
                *quantiles("quire_scheduler_transfer_seconds", 0.5, 0.99, selector=""),
            ],
            text="As reported by workers. Steps continue meanwhile; the sequences that wait for the transfer do not.",
            unit="s",
        ),
    ],
    "KV on disk": [
        curves(
            "Blocks on disk",
            [
                Query("sum by (engine) (quire_scheduler_disk_blocks_held{MODEL})", "held {{engine}}"),
                Query("sum by (engine) (quire_scheduler_disk_blocks_total{MODEL})", "room {{engine}}"),
            ],
            text="Workers with --kv-offloading-disk. The blocks survive a restart of the worker.",
        ),
        curves(
            "Blocks moved to and from disk",
            [
                Query("sum(rate(quire_scheduler_disk_blocks_stored_total{MODEL}[$__rate_interval]))", "written"),
                Query("sum(rate(quire_scheduler_disk_blocks_fetched_total{MODEL}[$__rate_interval]))", "read back"),
                Query("sum(rate(quire_scheduler_disk_blocks_dropped_total{MODEL}[$__rate_interval]))", "not written"),
                Query("sum(rate(quire_scheduler_disk_blocks_lost_total{MODEL}[$__rate_interval]))", "lost"),
            ],
            text="Blocks per second. Lost blocks are recomputed.",
            unit="ops",
        ),
        curves(
            "What the disk did not do",
            [
                Query(
                    "sum by (operation, reason) (rate(quire_worker_kv_disk_failures_total[$__rate_interval]))",
                    "{{operation}} {{reason}}",
                )
            ],
            text="Blocks a second: full, error (EIO and missing files), wrong (torn, swapped), late, busy.",
            unit="ops",
        ),
    ],
    "KV from worker to worker": [
        curves(
            "Fetches",
            [Query("sum by (outcome) (rate(quire_scheduler_fetches_total[$__rate_interval]))", "{{outcome}}")],
            text="Per second. A failed transfer costs a recomputation.",
            unit="ops",
        ),
        curves(
            "Tokens not computed",
            [Query("sum by (worker) (rate(quire_scheduler_fetched_tokens_total[$__rate_interval]))", "{{worker}}")],
            text="Tokens per second whose KV came from another worker.",
        ),
        curves(
            "Time of a fetch",
            [
                average("quire_scheduler_fetch_seconds", ""),
                *quantiles("quire_scheduler_fetch_seconds", 0.5, 0.99, selector=""),
            ],
            text="From the first byte to the last.",
            unit="s",
        ),
    ],
}
