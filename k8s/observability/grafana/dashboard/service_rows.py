"""Panels about failures, capacity and the services' edges."""

from __future__ import annotations

from panels import EVERYTHING, Panel, Query, average, curves, quantiles

ROWS: dict[str, list[Panel]] = {
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
            text="Aborted requests per second, by reason.",
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
            text="Requests refused because of overload.",
            unit="reqps",
        ),
        curves(
            "Cancelled",
            [Query("sum by (reason) (rate(quire_frontend_cancellations_total[$__rate_interval]))", "{{reason}}")],
            text="Samples ended by something other than the model.",
            unit="reqps",
        ),
        curves(
            "Broken",
            [
                Query("sum(increase(quire_worker_sessions_broken_total[$__rate_interval]))", "sessions"),
                Query("sum(increase(quire_worker_slot_failures_total[$__rate_interval]))", "sequences"),
            ],
            text="Attachments ended by an error; sequences that a worker could not continue.",
        ),
        curves(
            "Attachments",
            [Query("sum by (instance) (increase(quire_worker_attached_total[$__rate_interval]))", "{{instance}}")],
            text="Of workers, at a scheduler.",
        ),
    ],
    "Resumable streams": [
        curves(
            "Streams",
            [
                Query("sum(quire_frontend_streams_made)", "made"),
                Query("sum(quire_frontend_streams)", "made, kept or followed"),
                Query("sum(quire_frontend_stream_readers)", "readers"),
            ],
            text="Streams that continue without their client, including background responses, and their readers.",
        ),
        curves(
            "Streams begun and taken up",
            [
                Query("sum(rate(quire_frontend_streams_begun_total[$__rate_interval]))", "begun"),
                Query("sum(rate(quire_frontend_stream_attaches_total[$__rate_interval]))", "taken up again"),
                Query("sum(rate(quire_frontend_stream_takeovers_total[$__rate_interval]))", "gone on with elsewhere"),
                Query("sum(rate(quire_frontend_streams_unkept_total[$__rate_interval]))", "not kept by Redis"),
            ],
            text="Per second. Continued elsewhere: the frontend that created the stream was lost.",
            unit="reqps",
        ),
        curves(
            "Streams ended",
            [Query("sum by (reason) (rate(quire_frontend_streams_ended_total[$__rate_interval]))", "{{reason}}")],
            text="Per second. Unread: no reader within the retention. Elsewhere: another frontend continues it.",
            unit="reqps",
        ),
        curves(
            "Streams refused",
            [Query("sum by (reason) (rate(quire_frontend_streams_refused_total[$__rate_interval]))", "{{reason}}")],
            text="Per second. Full: stream_limits. Not found: another tenant's, or expired.",
            unit="reqps",
        ),
        curves(
            "Memory of streams",
            [Query("quire_frontend_stream_bytes", "{{instance}}")],
            text="Per frontend; limited by frontend_bytes in stream_limits.",
            unit="bytes",
        ),
    ],
    "Adapters and weights": [
        curves(
            "Adapters loaded",
            [
                Query(
                    "sum by (outcome) (increase(quire_scheduler_adapter_loads_total[$__rate_interval]))", "{{outcome}}"
                )
            ],
            text="Loads on workers, reloads into device slots included. Lost: the worker was lost before it reported.",
        ),
        curves(
            "Weight updates",
            [
                Query(
                    "sum by (outcome) (increase(quire_scheduler_weight_updates_total[$__rate_interval]))", "{{outcome}}"
                )
            ],
            text="Dropped: the caller left, or another scheduler's workers refused.",
        ),
    ],
    "Batches": [
        curves(
            "Requests of batches",
            [Query("sum by (outcome) (rate(quire_frontend_batch_requests_total[$__rate_interval]))", "{{outcome}}")],
            text="Lines of /v1/batches answered per second.",
            unit="reqps",
        ),
        curves(
            "Batches ended",
            [Query("sum by (status) (increase(quire_frontend_batches_ended_total[$__rate_interval]))", "{{status}}")],
            text="Batches of /v1/batches. Failed: the input file was refused.",
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
            text="Event-loop lag: how late a timer fires. Every stream waits that long.",
            unit="s",
        ),
        curves(
            "In flight",
            [
                Query("quire_frontend_inflight_requests", "{{instance}}"),
                Query("quire_frontend_waiting_for_scheduler", "waiting for a scheduler {{instance}}"),
                Query("quire_frontend_held_requests", "held, for want of a worker {{instance}}"),
            ],
            text="Samples in progress; submissions waiting for a session; requests waiting for a first worker.",
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
            "Connections",
            [
                Query("quire_frontend_connections", "{{instance}}"),
                Query(
                    "sum by (reason) (rate(quire_frontend_closed_connections_total[$__rate_interval]))",
                    "closed a second: {{reason}}",
                ),
            ],
            text="HTTP connections, and those that the frontend closed.",
        ),
        curves(
            "Without a good key",
            [
                Query(
                    "sum by (reason) (rate(quire_frontend_access_refusals_total[$__rate_interval]))",
                    "{{reason}}",
                )
            ],
            text="Calls refused because of their API key, per second.",
            unit="reqps",
        ),
        curves(
            "CPU of frontends",
            [Query('rate(process_cpu_seconds_total{job="quire-frontend"}[$__rate_interval])', "cores {{instance}}")],
            text="A frontend is one event loop: one core is its maximum.",
        ),
    ],
    "Sound": [
        curves(
            "Sound transcribed",
            [
                Query("sum(rate(quire_frontend_audio_seconds_total[$__rate_interval]))", "seconds a second"),
                Query("sum(rate(quire_frontend_audio_silence_seconds_total[$__rate_interval]))", "without speech"),
            ],
            text="Length of the sound, for each second. Only of models that transcribe.",
        ),
        curves(
            "Real-time factor",
            [
                *quantiles("quire_frontend_transcription_real_time_factor", 0.99, 0.5, selector=EVERYTHING),
                average("quire_frontend_transcription_real_time_factor", selector=EVERYTHING),
            ],
            text="Time of a transcription over the length of its sound.",
        ),
        curves(
            "Waiting and doubtful",
            [
                Query("sum by (instance) (quire_frontend_transcriptions_waiting)", "waiting {{instance}}"),
                Query("sum by (instance) (quire_frontend_realtime_sessions)", "realtime sessions {{instance}}"),
                Query(
                    "sum(rate(quire_frontend_transcription_fallbacks_total[$__rate_interval]))",
                    "segments of a higher temperature, a second",
                ),
            ],
            text="Files that wait for memory, open sessions, and texts that were tried again.",
        ),
        curves(
            "Memory of transcriptions",
            [Query("sum by (instance) (quire_frontend_transcription_bytes)", "{{instance}}")],
            text="Files and samples in progress, as reckoned before they are read.",
            unit="bytes",
        ),
    ],
}
