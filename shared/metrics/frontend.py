"""Metrics of a frontend: what its clients observe. Names under vllm: are those that dashboards for vLLM use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.shared.metrics.base import (
    COUNT_BUCKETS,
    ITL_BUCKETS,
    LATENCY_BUCKETS,
    MIGRATION_BUCKETS,
    MODEL_LABELS,
    PREEMPTION_BUCKETS,
    REDIS_ENTRY_KINDS,
    STEP_BUCKETS,
    TTFT_BUCKETS,
    add_process_collectors,
    token_buckets,
)
from quire.shared.metrics.batches import BatchMetrics
from quire.shared.metrics.calls import CallMetrics
from quire.shared.metrics.histogram import Histogram, Series
from quire.shared.metrics.media import MediaCollector, MediaStatus
from quire.shared.metrics.sound import SoundMetrics, SoundStatus
from quire.shared.metrics.streams import StreamMetrics

ENGINE = "0"  # a frontend does not belong to a worker
FINISHED_REASONS = ("stop", "length", "abort", "error", "repetition")
CLOSED_REASONS = ("too_many", "headers", "body", "write")
ACCESS_REFUSAL_REASONS = ("missing", "unknown")
REJECTION_REASONS = ("max_inflight_requests", "max_queued_tokens", "scheduler")
LOOKUP_OUTCOMES = ("hit", "miss", "skipped", "timeout", "error")
CANCELLATION_REASONS = ("cancelled", "deadline", "stop_string", "failed")


class TokenTraffic(Collector):
    """Tokens sent to clients and the gaps between them. They change with every token, so they are plain numbers of
    the event loop that also serves the page; a locked prometheus_client value costs ten times as much."""

    def __init__(self, label_values: Sequence[str]) -> None:
        self._label_values = label_values
        self._gap_counts = [0] * (len(ITL_BUCKETS) + 1)
        self._gap_sum = 0.0
        self.generated = 0

    def observe_gap(self, seconds: float) -> None:
        self._gap_counts[bisect_left(ITL_BUCKETS, seconds)] += 1
        self._gap_sum += seconds

    def collect(self) -> Iterator[Metric]:
        """Yields the counter of generated tokens and the histogram of gaps between deliveries."""
        tokens = CounterMetricFamily("vllm:generation_tokens", "Tokens generated", labels=MODEL_LABELS)
        tokens.add_metric(self._label_values, self.generated)
        yield tokens
        gaps = HistogramMetricFamily(
            "vllm:inter_token_latency_seconds", "Time between deliveries of tokens of a sample", labels=MODEL_LABELS
        )
        edges = [*(str(float(edge)) for edge in ITL_BUCKETS), "+Inf"]
        gaps.add_metric(self._label_values, list(zip(edges, accumulate(self._gap_counts), strict=True)), self._gap_sum)
        yield gaps


class FrontendMetrics:
    """All metrics of one frontend, in a registry of its own, so that several frontends can run in one process."""

    def __init__(self, model_name: str, max_model_len: int) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, ENGINE)
        self._model_name = model_name
        self._add_tokens(token_buckets(max_model_len))
        self._add_latencies()
        self._add_outcomes()
        self._add_own()
        self._add_redis()
        self.tenant_registry = CollectorRegistry()
        self.calls = CallMetrics(self.registry, self.tenant_registry)
        add_process_collectors(self.registry)

    def page(self, *, tenants: bool) -> bytes:
        """Returns the metrics page. `tenants`: include metrics by tenant, which only operators may see where tenants
        have keys."""
        return generate_latest(self.registry) + (generate_latest(self.tenant_registry) if tenants else b"")

    def add_media(self, status: Callable[[], MediaStatus]) -> None:
        """Adds the metrics of a model that takes pictures."""
        self.registry.register(MediaCollector(status, self._labels))

    def add_sound(self, status: Callable[[], SoundStatus]) -> SoundMetrics:
        """Adds the metrics of a model that transcribes, and returns them."""
        return SoundMetrics(self.registry, status)

    def count_unknown_field(self, label: str) -> None:
        """Counts an ignored field; `label` is one of the fixed set in http/fields/unknown_fields.py."""
        self.unknown_fields.labels(label).inc()

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: Sequence[float]) -> Series:
        histogram = Histogram(name, documentation, MODEL_LABELS, buckets=buckets, registry=self.registry)
        return histogram.labels(*self._labels)

    def _add_tokens(self, buckets: Sequence[int]) -> None:
        """Adds counters and histograms of tokens per request. `buckets`: edges in tokens."""
        self.traffic = TokenTraffic(self._labels)
        self.registry.register(self.traffic)
        self.prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens", *MODEL_LABELS).labels(*self._labels)
        self.cached_tokens = self._counter(
            "vllm:prompt_tokens_cached", "Prompt tokens found in the prefix cache", *MODEL_LABELS
        ).labels(*self._labels)
        self.request_computed_tokens = self._histogram(
            "vllm:request_prefill_kv_computed_tokens", "Tokens of a prompt that were not cached", buckets
        )
        self.request_prompt_tokens = self._histogram("vllm:request_prompt_tokens", "Tokens of a prompt", buckets)
        self.request_generation_tokens = self._histogram(
            "vllm:request_generation_tokens", "Tokens generated for a sample", buckets
        )
        self.request_max_num_generation_tokens = self._histogram(
            "vllm:request_max_num_generation_tokens", "Tokens of a request's longest sample", buckets
        )
        self.request_params_max_tokens = self._histogram(
            "vllm:request_params_max_tokens", "max_tokens of a request", buckets
        )
        self.request_params_n = self._histogram("vllm:request_params_n", "n of a request", COUNT_BUCKETS)
        self.request_num_preemptions = self._histogram(
            "vllm:request_num_preemptions",
            "Times that a sample was preempted, as its scheduler counts",
            PREEMPTION_BUCKETS,
        )

    def _add_latencies(self) -> None:
        """Adds the histograms of latencies, in seconds, under vLLM's names."""
        self.time_to_first_token = self._histogram(
            "vllm:time_to_first_token_seconds", "Time from a request's arrival to a sample's first token", TTFT_BUCKETS
        )
        self.time_per_output_token = self._histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time per output token of a sample after the first",
            ITL_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "vllm:e2e_request_latency_seconds", "Time from a request's arrival to the end of a sample", LATENCY_BUCKETS
        )
        self.queue_time = self._histogram(
            "vllm:request_queue_time_seconds",
            "Time of a sample in the scheduler's queue before its first step",
            LATENCY_BUCKETS,
        )
        self.prefill_time = self._histogram(
            "vllm:request_prefill_time_seconds", "Time from a sample's first step to its first token", LATENCY_BUCKETS
        )
        self.decode_time = self._histogram(
            "vllm:request_decode_time_seconds", "Time from a sample's first token to its last", LATENCY_BUCKETS
        )
        self.inference_time = self._histogram(
            "vllm:request_inference_time_seconds", "Time from a sample's first step to its last token", LATENCY_BUCKETS
        )

    def _add_outcomes(self) -> None:
        """Adds the counters of how requests, connections and calls ended; known labels exist from the start."""
        success = self._counter("vllm:request_success", "Samples that ended", *MODEL_LABELS, "finished_reason")
        self.request_success = {r: success.labels(*self._labels, r) for r in FINISHED_REASONS}
        parsed = self._counter(
            "vllm:tool_call_parser_invocations",
            "Samples that could call tools, and whether they did",
            "model_name",
            "mode",
            "outcome",
        )
        self.tool_parser = {
            (mode, outcome): parsed.labels(self._model_name, mode, outcome)
            for mode in ("streaming", "non_streaming")
            for outcome in ("tool_call", "no_tool_call")
        }
        rejections = self._counter(
            "vllm:admission_rejections", "Requests refused because a limit was reached", "model_name", "reason"
        )
        self.rejections = {r: rejections.labels(self._model_name, r) for r in REJECTION_REASONS}
        self.connections = Gauge("quire_frontend_connections", "HTTP connections", registry=self.registry)
        closed = self._counter("quire_frontend_closed_connections", "Connections that this frontend closed", "reason")
        self.closed_connections = {r: closed.labels(r) for r in CLOSED_REASONS}
        refusals = self._counter("quire_frontend_access_refusals", "Calls without a valid API key", "reason")
        self.access_refusals = {r: refusals.labels(r) for r in ACCESS_REFUSAL_REASONS}
        self.access_errors = self._counter("quire_frontend_access_errors", "Failed reloads of the API keys")
        cancellations = self._counter(
            "quire_frontend_cancellations", "Samples that ended before the model ended them", "reason"
        )
        self.cancellations = {r: cancellations.labels(r) for r in CANCELLATION_REASONS}
        self.http_requests = self._counter("http_requests", "HTTP requests answered", "handler", "method", "status")
        self.http_duration = Histogram(
            "http_request_duration_seconds",
            "Time from a request's headers to the end of its answer",
            ("handler", "method"),
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.unknown_fields = self._counter(
            "quire_unknown_request_fields", "Fields of HTTP bodies that were ignored; other: without a label", "field"
        )
        self.grpc_requests = self._counter("quire_frontend_grpc_requests", "gRPC calls answered", "method", "code")

    def _add_own(self) -> None:
        """Adds the metrics that vLLM does not have: load, waiting for workers, migration, streams, batches and the
        event loop."""
        self.inflight_requests = self._gauge(
            "inflight_requests", "Samples in flight: each of n outputs and each prompt of a list counts"
        )
        self.queued_tokens = self._gauge("queued_tokens", "Prompt tokens and max_tokens of requests in flight")
        self.waiting_for_scheduler = self._gauge(
            "waiting_for_scheduler", "Submissions that wait because no session can accept them"
        )
        self.held_requests = self._gauge("held_requests", "Requests that wait because no worker is attached")
        self.worker_start = self._gauge(
            "worker_start_seconds", "Longest time that requests wait for a first worker; 0: workers are always running"
        )
        self.held = Histogram(
            "quire_frontend_held_seconds",
            "Time that requests waited for the first worker",
            buckets=LATENCY_BUCKETS,
            registry=self.registry,
        )
        self.sessions_open = self._gauge("sessions_open", "Schedulers with which this frontend has a session")
        self.resubmitted = self._counter(
            "quire_frontend_resubmitted_sequences",
            "Sequences that continued on another scheduler with their tokens so far",
        )
        self.migration = Histogram(
            "quire_frontend_migration_seconds",
            "Time from a sequence's last token on a lost scheduler to its next token",
            buckets=MIGRATION_BUCKETS,
            registry=self.registry,
        )
        self.streams = StreamMetrics(self.registry)
        self.batches = BatchMetrics(self.registry)
        self.loop_delay = self._steps("event_loop_delay", "Delay of a timer of the event loop")
        self.detokenize = self._steps(
            "detokenize", "Time to convert the tokens of one step to the text of their streams"
        )
        self.write = self._steps("write", "Time from waking the streams with new output until all have written it")

    def _add_redis(self) -> None:
        """Adds the metrics of Redis and of prefix look-ups."""
        self.redis_up = self._gauge("redis_up", "1 if Redis is available, 0 if not or if none is used")
        malformed = self._counter(
            "quire_frontend_redis_malformed_entries",
            "Entries in Redis that could not be read and were skipped, by kind, at each reading",
            "kind",
        )
        self.malformed_entries = {kind: malformed.labels(kind) for kind in REDIS_ENTRY_KINDS}
        lookups = self._counter(
            "quire_frontend_prefix_lookups", "Prompts by outcome of the lookup of their cached prefix", "outcome"
        )
        self.prefix_lookups = {outcome: lookups.labels(outcome) for outcome in LOOKUP_OUTCOMES}
        self.prefix_lookup_duration = Histogram(
            "quire_frontend_prefix_lookup_seconds",
            "Time of a request spent looking up its cached prefix",
            buckets=STEP_BUCKETS,
            registry=self.registry,
        )

    def _steps(self, name: str, documentation: str) -> Histogram:
        return Histogram(f"quire_frontend_{name}_seconds", documentation, buckets=STEP_BUCKETS, registry=self.registry)

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"quire_frontend_{name}", documentation, registry=self.registry)
