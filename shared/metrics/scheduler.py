"""Metrics of a scheduler. Gauges and totals are read from the cluster when the page is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.shared.metrics.base import (
    ITERATION_BUCKETS,
    MIGRATION_BUCKETS,
    MODEL_LABELS,
    REDIS_ENTRY_KINDS,
    STEP_BUCKETS,
)
from quire.shared.metrics.histogram import Histogram
from quire.shared.metrics.operations import OperationMetrics
from quire.shared.pb.admin.v1 import admin_pb2 as pb

LOSS_REASONS = ("closed", "silent", "step_deadline", "superseded")
SLEEP_LEVELS = 2
ENCODE_OUTCOMES = ("done", "encoding_failed", "fetch_failed", "worker_lost")
REFUSAL_REASONS = ("max_waiting", "draining", "malformed")


class SchedulerMetrics:
    """Metrics that are observed as events happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self._define_steps(registry)
        self._define_transfers(registry)
        self._define_encoding(registry)
        self._define_workers(registry)
        self.operations = OperationMetrics(registry)
        for reason in LOSS_REASONS:  # increase() misses the first event of a series that does not exist before
            self.workers_lost.labels(reason)
        for reason in REFUSAL_REASONS:
            self.refused.labels(reason)

    def _define_steps(self, registry: CollectorRegistry) -> None:
        """Defines the metrics of planning, sending and applying steps."""
        self.schedule = Histogram(
            "quire_scheduler_schedule_seconds", "Planning one step", buckets=STEP_BUCKETS, registry=registry
        )
        self.encode = Histogram(
            "quire_scheduler_encode_seconds", "Encoding one plan", buckets=STEP_BUCKETS, registry=registry
        )
        self.deliver = Histogram(
            "quire_scheduler_return_seconds",
            "Time to pass the output of one step to the frontends' streams",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.apply = Histogram(
            "quire_scheduler_apply_seconds", "Time to apply one step's result", buckets=STEP_BUCKETS, registry=registry
        )
        self.step = Histogram(
            "quire_scheduler_step_seconds",
            "Time from sending a plan to receiving its result",
            ["worker"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.step_tokens = Histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed in a step",
            MODEL_LABELS,
            buckets=ITERATION_BUCKETS,
            registry=registry,
        )

    def _define_transfers(self, registry: CollectorRegistry) -> None:
        """Defines the metrics of KV blocks that move between tiers and workers."""
        self.transfer = Histogram(
            "quire_scheduler_transfer_seconds",
            "Time to move KV blocks between a device and host memory, as reported by the worker",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.fetch = Histogram(
            "quire_scheduler_fetch_seconds",
            "Time to receive KV blocks from another worker, first byte to last, as reported by the worker",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.fetches = Counter(
            "quire_scheduler_fetches",
            "Fetches of KV blocks from another worker, by outcome (done, failed)",
            ["worker", "outcome"],
            registry=registry,
        )
        self.handovers = Counter(
            "quire_scheduler_handovers",
            "Sequences handed to a decode worker: with all their blocks (done), or recomputing some (computed)",
            ["outcome"],
            registry=registry,
        )
        self.roles_missing = Gauge(
            "quire_scheduler_role_missing",
            "1 if no worker has the role that complements the others",
            ["role"],
            registry=registry,
        )
        self.fetched_bytes = Counter(
            "quire_scheduler_fetched_bytes", "KV bytes fetched from other workers", ["worker"], registry=registry
        )
        self.fetched_tokens = Counter(
            "quire_scheduler_fetched_tokens",
            "Tokens whose KV was fetched from another worker instead of being computed",
            ["worker"],
            registry=registry,
        )

    def _define_encoding(self, registry: CollectorRegistry) -> None:
        """Defines the metrics of media items that encode workers prepare."""
        self.encode_jobs = Counter(
            "quire_scheduler_encode_jobs",
            "Media items given to encode workers: their rows have arrived (done), they could not be encoded there "
            "(encoding_failed) or fetched (fetch_failed), or the encode worker detached (worker_lost)",
            ["outcome"],
            registry=registry,
        )
        for outcome in ENCODE_OUTCOMES:
            self.encode_jobs.labels(outcome)

    def _define_workers(self, registry: CollectorRegistry) -> None:
        """Defines the metrics of lost workers, moved sequences and refused submissions."""
        self.cancel_to_free = Histogram(
            "quire_scheduler_cancel_to_free_seconds",
            "Time from a cancellation until its KV blocks are free",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.workers_lost = Counter(
            "quire_scheduler_workers_lost", "Lost workers, by reason", ["reason"], registry=registry
        )
        self.migration = Histogram(
            "quire_scheduler_migration_seconds",
            "Time from a sequence's last token on a worker it had to leave to its first on another",
            buckets=MIGRATION_BUCKETS,
            registry=registry,
        )
        self.sequences_moved = Counter(
            "quire_scheduler_sequences_moved", "Sequences taken from a lost or leaving worker", registry=registry
        )
        self.refused = Counter("quire_scheduler_refused", "Submissions refused", ["reason"], registry=registry)


class DirectoryMetrics:
    """Metrics of the prefix index in Redis; constant without Redis."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.errors = Counter("quire_scheduler_redis_errors", "Failures to reach Redis", registry=registry)
        self.malformed = Counter(
            "quire_scheduler_redis_malformed_entries",
            "Entries in Redis that could not be read and were skipped, by kind, at each reading",
            ["kind"],
            registry=registry,
        )
        for kind in REDIS_ENTRY_KINDS:
            self.malformed.labels(kind)
        self.republished = Counter(
            "quire_scheduler_index_republished", "Whole caches of workers published (again)", registry=registry
        )
        self.up = Gauge(
            "quire_scheduler_redis_up", "1 if Redis is available, 0 if not or if none is used", registry=registry
        )
        self.entries = Gauge("quire_scheduler_index_entries", "Blocks published in the prefix index", registry=registry)
        self.lag = Gauge(
            "quire_scheduler_index_lag_seconds", "Age of the oldest change not in the index", registry=registry
        )


class ClusterCollector(Collector):
    """Gauges and totals of every worker, labelled by worker, under Quire's and vLLM's names."""

    def __init__(
        self,
        model_name: Callable[[], str],
        workers: Callable[[], Iterable[pb.ServiceStatus]],
        cluster: Callable[[], ClusterGauges],
    ) -> None:
        self._model_name = model_name
        self._workers = workers
        self._cluster = cluster

    def describe(self) -> Iterable[Metric]:
        return []  # prevents collection at registration, before the cluster exists

    def collect(self) -> Iterable[Metric]:
        """Yields all metrics of the workers and the cluster, read from their present status."""
        model = self._model_name()
        rows = [((model, worker.id), worker) for worker in self._workers()]
        yield _gauge("vllm:num_requests_running", "Sequences running", rows, lambda w: w.running)
        yield _gauge("vllm:num_requests_waiting", "Sequences waiting", rows, lambda w: w.waiting)
        cluster = self._cluster()
        yield _by_reason(model, rows, cluster)
        yield _config(rows, cluster)
        yield GaugeMetricFamily(
            "quire_scheduler_blocks_unowned", "KV blocks used that no live sequence owns", cluster.unowned_blocks
        )
        yield GaugeMetricFamily("quire_scheduler_paused", "1 while generation is paused, else 0", int(cluster.paused))
        yield from _encoding(cluster)
        yield _sleep_states(rows)
        outdated = "1 while a worker's weights or sleep state differ from those of its cluster, else 0"
        yield _gauge("quire_scheduler_outdated", outdated, rows, lambda w: w.state == pb.STATE_OUTDATED)
        yield _gauge("vllm:kv_cache_usage_perc", "KV blocks owned, 0 to 1", rows, _usage)
        yield _gauge("quire_scheduler_blocks_free", "KV blocks without useful contents", rows, lambda w: w.blocks.free)
        yield _gauge("quire_scheduler_blocks_cached", "Free KV blocks that can be hit", rows, lambda w: w.blocks.cached)
        yield _gauge("quire_scheduler_blocks_used", "KV blocks owned", rows, lambda w: w.blocks.used)
        yield _gauge(
            "quire_scheduler_last_step_age_seconds",
            "Seconds since a step last ended",
            rows,
            lambda w: w.last_step_age_s,
        )
        yield _gauge("quire_scheduler_tokens_per_second", "Tokens generated", rows, lambda w: w.work.tokens_per_s)
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up", rows, lambda w: w.work.prompt_tokens)
        yield _counter("vllm:prefix_cache_hits", "Prompt tokens found cached", rows, lambda w: w.work.cached_tokens)
        yield _counter("vllm:num_preemptions", "Preemptions", rows, lambda w: w.work.preemptions)
        yield _counter("quire_scheduler_generated_tokens", "Tokens generated", rows, lambda w: w.work.generated_tokens)
        documents, found = (
            "Documents compared with a query, token by token",
            "Documents whose query vectors were cached",
        )
        yield _counter("quire_scheduler_compared_documents", documents, rows, lambda w: w.work.compared_documents)
        yield _counter("quire_scheduler_query_hits", found, rows, lambda w: w.work.query_hits)
        yield from _host_memory([(labels, worker) for labels, worker in rows if worker.HasField("host_memory")])
        yield from _disk([(labels, worker) for labels, worker in rows if worker.HasField("disk")])
        yield from _speculation([(labels, worker) for labels, worker in rows if worker.HasField("drafts")])


@dataclass(frozen=True, slots=True)
class ClusterGauges:
    """Values that belong to no single worker."""

    deferred: int  # waiting for a worker, or for their grammar
    unowned_blocks: int
    block_size: int
    num_kv_groups: int = 1  # each needs a block for the same tokens
    max_model_len: int = 0
    paused: bool = False  # whether generation is paused
    encode_workers: int = 0
    encoding_items: int = 0  # media items that wait for an encode worker
    fetching_items: int = 0  # media items whose rows are fetched from one


Row = tuple[tuple[str, str], pb.ServiceStatus]
Read = Callable[[pb.ServiceStatus], float]


def _encoding(cluster: ClusterGauges) -> Iterable[Metric]:
    """Yields gauges of the encode workers and their jobs."""
    yield GaugeMetricFamily("quire_scheduler_encode_workers", "Encode workers attached", cluster.encode_workers)
    pending = GaugeMetricFamily(
        "quire_scheduler_encode_jobs_pending",
        "Media items that other workers wait for: at an encode worker (encoding), or being fetched from it (fetching)",
        labels=["stage"],
    )
    pending.add_metric(["encoding"], cluster.encoding_items)
    pending.add_metric(["fetching"], cluster.fetching_items)
    yield pending


def _sleep_states(rows: list[Row]) -> Metric:
    """Returns a gauge with one series per worker and sleep state: awake, weights offloaded or everything discarded."""
    family = GaugeMetricFamily(
        "vllm:engine_sleep_state", "1 for the current state, else 0", labels=[*MODEL_LABELS, "sleep_state"]
    )
    for labels, worker in rows:
        asleep = (not worker.asleep, worker.sleep_level == 1, worker.sleep_level == SLEEP_LEVELS)
        for state, holds in zip(("awake", "weights_offloaded", "discard_all"), asleep, strict=True):
            family.add_metric([*labels, state], holds)
    return family


def _by_reason(model: str, rows: list[Row], cluster: ClusterGauges) -> Metric:
    """Waiting sequences by reason: capacity: in a worker's queue; deferred: no worker can run it, or its grammar is
    being prepared."""
    family = GaugeMetricFamily(
        "vllm:num_requests_waiting_by_reason", "Sequences waiting", labels=(*MODEL_LABELS, "reason")
    )
    for labels, worker in rows:
        family.add_metric((*labels, "capacity"), worker.waiting)
    family.add_metric((model, "", "deferred"), cluster.deferred)
    return family


def _config(rows: list[Row], cluster: ClusterGauges) -> Metric:
    """Returns vLLM's info metric of the KV cache sizes, as labels: blocks, tokens, and sequences of maximum length
    that fit."""
    names = ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency")
    family = GaugeMetricFamily("vllm:cache_config_info", "KV cache sizes, as labels", labels=(*MODEL_LABELS, *names))
    for labels, worker in rows:
        num_tokens = worker.blocks.total // cluster.num_kv_groups * cluster.block_size
        longest = f"{num_tokens / cluster.max_model_len if cluster.max_model_len else 0:.2f}"
        sizes = (cluster.block_size, worker.blocks.total, num_tokens, longest)
        family.add_metric((*labels, *map(str, sizes)), 1)
    return family


def _host_memory(rows: list[Row]) -> Iterable[Metric]:
    """Yields gauges and counters of the workers' host memory tier; nothing without `rows`."""
    if not rows:
        return
    name = "quire_scheduler_host_blocks"
    yield _gauge(f"{name}_total", "Capacity of host memory, KV blocks", rows, lambda w: w.host_memory.total)
    yield _gauge(f"{name}_held", "KV blocks in host memory", rows, lambda w: w.host_memory.held)
    yield _counter(f"{name}_stored", "KV blocks copied to host memory", rows, lambda w: w.host_memory.stored)
    yield _counter(f"{name}_fetched", "KV blocks copied back from host memory", rows, lambda w: w.host_memory.fetched)
    failed = "quire_scheduler_transfers_failed"
    yield _counter(
        failed, "Failed transfers between device and host memory", rows, lambda w: w.host_memory.failed_transfers
    )


def _disk(rows: list[Row]) -> Iterable[Metric]:
    """Yields gauges and counters of the workers' disk tier; nothing without `rows`."""
    if not rows:
        return
    name = "quire_scheduler_disk_blocks"
    yield _gauge(f"{name}_total", "Capacity of the disk tier, KV blocks", rows, lambda w: w.disk.total)
    yield _gauge(f"{name}_held", "KV blocks on disk", rows, lambda w: w.disk.held)
    yield _counter(f"{name}_stored", "KV blocks written to disk", rows, lambda w: w.disk.stored)
    yield _counter(f"{name}_fetched", "KV blocks read back from disk", rows, lambda w: w.disk.fetched)
    yield _counter(f"{name}_lost", "KV blocks that could not be read back from disk", rows, lambda w: w.disk.lost)
    yield _counter(f"{name}_dropped", "KV blocks that could not be written to disk", rows, lambda w: w.disk.dropped)


def _speculation(rows: list[Row]) -> Iterable[Metric]:
    """Yields counters of the workers' speculative decoding and the present draft length; nothing without `rows`."""
    if not rows:
        return
    yield _counter("vllm:spec_decode_num_drafts", "Verified drafts", rows, lambda w: w.drafts.num_drafts)
    yield _counter(
        "vllm:spec_decode_num_draft_tokens", "Verified draft tokens", rows, lambda w: w.drafts.num_draft_tokens
    )
    yield _counter(
        "vllm:spec_decode_num_accepted_tokens",
        "Accepted draft tokens",
        rows,
        lambda w: w.drafts.num_accepted_tokens,
    )
    by_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "Accepted draft tokens, by position in the draft, from 0",
        labels=(*MODEL_LABELS, "position"),
    )
    for labels, worker in rows:
        for position, accepted in enumerate(worker.drafts.num_accepted_tokens_per_pos):
            by_position.add_metric((*labels, str(position)), accepted)
    yield by_position
    yield _gauge("quire_scheduler_draft_length", "Most drafts per sequence and step", rows, lambda w: w.drafts.length)


def _usage(worker: pb.ServiceStatus) -> float:
    return worker.blocks.used / worker.blocks.total if worker.blocks.total else 0.0


def _gauge(name: str, text: str, rows: list[Row], read: Read) -> Metric:
    """Returns a gauge with one series per worker, whose value `read` takes from the worker's status."""
    family = GaugeMetricFamily(name, text, labels=MODEL_LABELS)
    for labels, worker in rows:
        family.add_metric(labels, read(worker))
    return family


def _counter(name: str, text: str, rows: list[Row], read: Read) -> Metric:
    """Returns a counter with one series per worker, whose value `read` takes from the worker's status."""
    family = CounterMetricFamily(name, text, labels=MODEL_LABELS)
    for labels, worker in rows:
        family.add_metric(labels, read(worker))
    return family
