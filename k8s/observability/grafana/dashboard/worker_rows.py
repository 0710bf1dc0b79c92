"""Panels about workers: capacity, masks, experts, and their processes."""

from __future__ import annotations

from panels import EVERYTHING, Panel, Query, average, curves, quantiles, stat

ROWS: dict[str, list[Panel]] = {
    "Workers, now": [
        stat("Workers", [Query("count(quire_worker_epoch > 0)", "")], text="That are attached.", red_below=1),
        stat(
            "Processes a model is cut into",
            [
                Query("max(quire_worker_ranks)", "ranks"),
                Query("max(quire_worker_stages)", "stages"),
                Query("max(quire_worker_contexts)", "contexts"),
            ],
            text="Ranks, the stages that these share its layers among, and the groups that share long prompts.",
        ),
        stat(
            "Oldest step",
            [Query("max(quire_worker_last_step_age_seconds)", "")],
            text="Since a step ended; it grows while there is no work.",
            unit="s",
        ),
        stat(
            "Blocks",
            [Query("sum(quire_worker_blocks_total)", "")],
            text="KV blocks of all workers.",
        ),
        stat(
            "Peak of the devices",
            [Query("sum(quire_worker_peak_flops_per_second)", "")],
            text="Floating-point operations a second, as makers state them; 0 where that is not known.",
        ),
        stat(
            "Peak of their memory",
            [Query("sum(quire_worker_peak_bytes_per_second)", "")],
            text="As makers state it; 0 where that is not known.",
            unit="Bps",
        ),
    ],
    "Tokens and masks": [
        curves(
            "Tokens through the model",
            [
                Query(
                    "sum by (instance) (rate(quire_worker_tokens_computed_total[$__rate_interval]))",
                    "computed {{instance}}",
                ),
                Query(
                    "sum by (instance) (rate(quire_worker_tokens_sampled_total[$__rate_interval]))",
                    "sampled {{instance}}",
                ),
            ],
            text="A second.",
        ),
        curves(
            "Grammar masks",
            [
                Query(average("quire_worker_mask_fill_seconds", selector=EVERYTHING).expression, "fill, average"),
                Query(average("quire_worker_mask_wait_seconds", selector=EVERYTHING).expression, "waited for, average"),
            ],
            text="Of a step with constrained outputs: masks are filled beside the device's work; what it waits for them is lost.",
            unit="s",
        ),
        curves(
            "Grammars",
            [
                Query("sum by (outcome) (rate(quire_worker_grammars_prepared_total[$__rate_interval]))", "{{outcome}}"),
                *(
                    Query(query.expression, f"seconds to compile, {query.legend}")
                    for query in quantiles("quire_worker_grammar_compile_seconds", 0.99, selector=EVERYTHING)
                ),
            ],
            text="Asked for, a second, by what came of it.",
        ),
    ],
    "Pictures": [
        curves(
            "Rows kept",
            [
                Query("quire_worker_encoder_cache_rows", "rows {{instance}}"),
                Query("quire_worker_encoder_cache_capacity_rows", "capacity {{instance}}"),
            ],
            text="Embeddings of pictures that the encoder cache holds. Only of models that take pictures.",
        ),
        curves(
            "Prepared",
            [Query("sum by (outcome) (rate(quire_worker_media_items_total[$__rate_interval]))", "{{outcome}}")],
            text="Pictures a second, by outcome. Failed ones cost their request alone.",
        ),
        curves(
            "Time of a picture",
            [
                Query(
                    "sum by (stage) (rate(quire_worker_media_seconds_sum[$__rate_interval])) / "
                    "sum by (stage) (rate(quire_worker_media_seconds_count[$__rate_interval]))",
                    "{{stage}}, average",
                ),
            ],
            text="Fetching the pixels from a frontend; encoding them, with the wait for the device.",
            unit="s",
        ),
    ],
    "Experts": [
        curves(
            "Busiest expert",
            [Query("max by (instance) (quire_worker_expert_busiest_ratio)", "{{instance}}")],
            text="Tokens of the busiest expert over the mean of its layer, of the most uneven layer. Only of models with experts.",
        ),
        curves(
            "Tokens of experts",
            [Query("sum by (instance) (rate(quire_worker_expert_tokens_total[$__rate_interval]))", "{{instance}}")],
            text="All layers, a second.",
        ),
        curves(
            "Unused experts",
            [Query("sum by (instance) (quire_worker_experts_unused)", "{{instance}}")],
            text="That have had no token since the start.",
        ),
    ],
    "Processes": [
        curves(
            "Memory",
            [Query("process_resident_memory_bytes", "{{job}} {{instance}}")],
            text="Resident. Of workers on a GPU this is not the GPU's.",
            unit="bytes",
        ),
        curves(
            "CPU",
            [Query("rate(process_cpu_seconds_total[$__rate_interval])", "{{job}} {{instance}}")],
            text="Cores.",
        ),
        curves(
            "Descriptors",
            [Query("process_open_fds / process_max_fds", "{{job}} {{instance}}")],
            text="Share of those that a process may open. New connections are refused near 1.",
            unit="percentunit",
            highest=1,
        ),
    ],
}
