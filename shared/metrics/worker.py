"""Metrics of a worker. Steps are counted as they end; gauges are read when the page is requested."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sized
from operator import add
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.shared.metrics.base import STEP_BUCKETS
from quire.shared.metrics.histogram import Histogram
from quire.shared.pb.admin.v1 import admin_pb2

MICROSECOND = 1e-6
PHASES = ("wait", "prepare", "forward", "sample")
MOVED = ("weights", "kv_read", "kv_written")
UTILISATION_OVER_S = 0.25  # busy time after which the gauges are updated
DISK_FAILURES = ("full", "error", "wrong", "late", "busy")
GRAMMAR_OUTCOMES = ("compiled", "cached", "failed")
MEDIA_OUTCOMES = ("encoded", "received", "failed")


class StepTimings(Protocol):
    """Durations of a step on the device."""

    @property
    def prepare_us(self) -> int: ...

    @property
    def forward_us(self) -> int: ...

    @property
    def sample_us(self) -> int: ...


class StepOutcome(Protocol):
    """Parts of a step's result that are measured."""

    @property
    def wait_us(self) -> int:
        """Time from the arrival of the plan to the launch of the step."""

    @property
    def timings(self) -> StepTimings: ...

    @property
    def token_ids(self) -> Sized: ...

    @property
    def failures(self) -> Sized: ...


class GrammarOutcome(Protocol):
    """Result of preparing a grammar."""

    @property
    def error(self) -> object | None: ...

    @property
    def compile_us(self) -> int:
        """Compile time; 0: it was already compiled."""


class Peak(NamedTuple):
    """Peak performance of a device per second; 0: unknown."""

    flops: float
    bytes: float


class StepCost(NamedTuple):
    """Minimum cost of a step, derived from the model's sizes."""

    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float

    def plus(self, other: StepCost) -> StepCost:
        return StepCost(*map(add, self, other))


NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)


class StepTotals(Collector):
    """Totals over all steps. They change with every step, so they are plain numbers of the event loop that the
    page's thread reads: seven locked prometheus_client values cost 6 us per step."""

    def __init__(self) -> None:
        self.computed = self.sampled = 0
        self.cost, self.busy_s = NO_COST, 0.0

    def collect(self) -> Iterable[Metric]:
        """Yields the counters of tokens, busy time, and the minimum operations and bytes of all steps."""
        for name, text, value in (
            ("tokens_computed", "Tokens computed by the model", self.computed),
            ("tokens_sampled", "Tokens sampled", self.sampled),
            ("step_busy_seconds", "Time in forward passes and sampling", self.busy_s),
            (
                "model_flops",
                "Minimum floating-point operations of the steps, derived from the model's sizes",
                self.cost.flops,
            ),
        ):
            yield CounterMetricFamily(f"quire_worker_{name}", text, value=value)
        text = "Minimum bytes of memory traffic of the steps, derived from the model's sizes"
        moved = CounterMetricFamily("quire_worker_model_bytes", text, labels=["what"])
        for what, num_bytes in zip(MOVED, self.cost[1:], strict=True):
            moved.add_metric([what], num_bytes)
        yield moved


class DiskMetrics:
    """Metrics of the disk tier for KV blocks; methods may be called from any thread."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._written = Counter("quire_worker_kv_disk_written_bytes", "KV written to disk", registry=registry)
        self._read = Counter("quire_worker_kv_disk_read_bytes", "KV read back from disk", registry=registry)
        self._failures = Counter(
            "quire_worker_kv_disk_failures",
            "KV blocks that were not written or not read, by reason (full, error, wrong, late, busy)",
            ["operation", "reason"],
            registry=registry,
        )
        for operation in ("write", "read"):
            for reason in DISK_FAILURES:
                self._failures.labels(operation, reason)

    def wrote(self, num_bytes: int) -> None:
        self._written.inc(num_bytes)

    def on_read(self, num_bytes: int) -> None:
        self._read.inc(num_bytes)

    def failed(self, what: str, reason: str) -> None:
        self._failures.labels(what, reason).inc()


class WorkerMetrics:
    """Metrics of steps, grammars and adapters that are observed as events happen."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        phases = Histogram(
            "quire_worker_step_phase_seconds",
            "Phases of a step: waiting for the previous step, building inputs, forward pass, sampling",
            ["phase"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._observe_phases = [phases.labels(phase).observe for phase in PHASES]
        self._totals = StepTotals()
        registry.register(self._totals)
        self.failures = Counter(
            "quire_worker_slot_failures", "Sequences that this worker could not continue", registry=registry
        )
        self.adapters_left_out = Counter(
            "quire_worker_adapters_left_out",
            "Adapters of --lora that were skipped because their file is damaged",
            registry=registry,
        )
        self.kv_sent = Counter("quire_worker_kv_sent_bytes", "KV bytes sent to other workers", registry=registry)
        self.kv_received = Counter(
            "quire_worker_kv_received_bytes", "KV bytes fetched from other workers", registry=registry
        )
        self.kv_fetches_failed = Counter("quire_worker_kv_fetches_failed", "Failed fetches of KV", registry=registry)
        self.disk = DiskMetrics(registry)
        self.attached = Counter("quire_worker_attached", "Attachments to a scheduler", registry=registry)
        self.broken = Counter("quire_worker_sessions_broken", "Attachments that ended with an error", registry=registry)
        self.grammar_compile = Histogram(
            "quire_worker_grammar_compile_seconds",
            "Time to compile a grammar for constrained outputs",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.mask_fill = Histogram(
            "quire_worker_mask_fill_seconds",
            "Time to fill the grammar masks of a step, concurrently with the device",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.mask_wait = Histogram(
            "quire_worker_mask_wait_seconds",
            "Time that the launch of a step waited for its grammar masks",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.grammars = Counter(
            "quire_worker_grammars_prepared", "Requested grammars, by outcome", ["outcome"], registry=registry
        )
        for outcome in GRAMMAR_OUTCOMES:
            self.grammars.labels(outcome)
        self._add_media(registry)
        self._add_costs(registry)

    def _add_media(self, registry: CollectorRegistry) -> None:
        """Adds the metrics of media items to the registry, with every outcome at 0."""
        self.media_items = Counter(
            "quire_worker_media_items",
            "Media items ordered by the scheduler, by outcome: encoded, received from an encode worker, or failed",
            ["outcome"],
            registry=registry,
        )
        self.media_stages = Histogram(
            "quire_worker_media_seconds",
            "Preparing a media item: fetching its pixels or rows, and encoding pixels, with the wait for the device",
            ["stage"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        for outcome in MEDIA_OUTCOMES:
            self.media_items.labels(outcome)

    def _add_costs(self, registry: CollectorRegistry) -> None:
        """Adds the gauges of peak performance and utilisation to the registry; all are 0 until set_peak() is called."""
        self._peak_flops = Gauge(
            "quire_worker_peak_flops_per_second",
            "Peak FLOP/s of the device according to its vendor; 0: unknown",
            registry=registry,
        )
        self._peak_bandwidth = Gauge(
            "quire_worker_peak_bytes_per_second",
            "Peak memory bandwidth of the device according to its vendor; 0: unknown",
            registry=registry,
        )
        self._utilisation = Gauge(
            "quire_worker_model_flops_utilisation",
            "FLOPs of the recent steps relative to the device's peak; 0: unknown",
            registry=registry,
        )
        self._bandwidth = Gauge(
            "quire_worker_model_bandwidth_utilisation",
            "Memory traffic of the recent steps relative to the device's peak; 0: unknown",
            registry=registry,
        )
        self._peak = Peak(0.0, 0.0)
        self._reported, self._reported_s = NO_COST, 0.0  # totals at the last update of utilisation

    def set_peak(self, peak: Peak) -> None:
        self._peak = peak
        self._peak_flops.set(peak.flops)
        self._peak_bandwidth.set(peak.bytes)

    def grammar_prepared(self, prepared: GrammarOutcome) -> None:
        """Counts a prepared grammar as failed, compiled or cached, and observes the compile time."""
        if prepared.error is not None:
            self.grammars.labels("failed").inc()
        else:
            self.grammars.labels("compiled" if prepared.compile_us else "cached").inc()
        if prepared.compile_us:
            self.grammar_compile.observe(prepared.compile_us * MICROSECOND)

    def media_prepared(self, fetch_us: int, encode_us: int, *, outcome: str) -> None:
        """Counts a media item by its outcome and observes the time of its stages. The rows that another worker has
        computed take no stage of encoding."""
        self.media_items.labels(outcome).inc()
        encode_us = 0 if outcome == "received" else encode_us
        for stage, took_us in (("fetch", fetch_us), ("encode", encode_us)):
            if took_us:
                self.media_stages.labels(stage).observe(took_us * MICROSECOND)

    def observe_mask_fill(self, seconds: float) -> None:
        self.mask_fill.observe(seconds)

    def observe_mask_wait(self, seconds: float) -> None:
        self.mask_wait.observe(seconds)

    def observe_step(self, result: StepOutcome, num_tokens: int, cost: StepCost) -> None:
        """Observes the durations of a step's phases and adds its tokens and cost to the totals; updates utilisation
        after every UTILISATION_OVER_S of busy time."""
        timings = result.timings
        forward_us, sample_us = timings.forward_us, timings.sample_us
        wait, prepare, forward, sample = self._observe_phases
        wait(result.wait_us * MICROSECOND)
        prepare(timings.prepare_us * MICROSECOND)
        forward(forward_us * MICROSECOND)
        sample(sample_us * MICROSECOND)
        totals = self._totals
        totals.computed += num_tokens
        totals.sampled += len(result.token_ids)
        totals.cost = totals.cost.plus(cost)
        totals.busy_s += (forward_us + sample_us) * MICROSECOND
        if totals.busy_s - self._reported_s >= UTILISATION_OVER_S:
            self._update_utilisation(totals.cost, totals.busy_s)
        if result.failures:
            self.failures.inc(len(result.failures))

    def _update_utilisation(self, cost: StepCost, busy_s: float) -> None:
        """Updates the utilisation gauges for the steps since the last update."""
        seconds = busy_s - self._reported_s
        if self._peak.flops:
            self._utilisation.set((cost.flops - self._reported.flops) / seconds / self._peak.flops)
        if self._peak.bytes:
            self._bandwidth.set((sum(cost[1:]) - sum(self._reported[1:])) / seconds / self._peak.bytes)
        self._reported, self._reported_s = cost, busy_s


class ExpertLoadCollector(Collector):
    """Load balance of the experts of each layer; empty for models without experts."""

    def __init__(self, read: Callable[[], Mapping[int, Iterable[int]]]) -> None:
        """`read`: returns, by layer, the number of tokens that each expert has computed."""
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        """Yields the tokens, the ratio of the busiest expert to the mean, and the number of unused experts of each
        layer, since start-up."""
        tokens = CounterMetricFamily(
            "quire_worker_expert_tokens", "Tokens that experts of a layer computed, padding included", labels=["layer"]
        )
        busiest = GaugeMetricFamily(
            "quire_worker_expert_busiest_ratio",
            "Tokens of a layer's busiest expert relative to the mean over its experts, since start-up",
            labels=["layer"],
        )
        unused = GaugeMetricFamily(
            "quire_worker_experts_unused", "Experts of a layer that have had no token", labels=["layer"]
        )
        for layer, given in self._read().items():
            counts = [int(count) for count in given]
            tokens.add_metric([str(layer)], sum(counts))
            busiest.add_metric([str(layer)], max(counts) * len(counts) / max(sum(counts), 1))
            unused.add_metric([str(layer)], counts.count(0))
        yield from (tokens, busiest, unused)


class EncoderCacheUse(NamedTuple):
    """Use of the cache of encoder outputs."""

    num_rows: int
    num_items: int
    capacity: int  # in rows; 0: no encoder


NO_ENCODER_CACHE = EncoderCacheUse(0, 0, 0)


class EncoderCacheCollector(Collector):
    """Gauges of the rows that are kept for media items."""

    def __init__(self, read: Callable[[], EncoderCacheUse]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        """Yields rows, items and capacity."""
        found = self._read()
        yield GaugeMetricFamily("quire_worker_encoder_cache_rows", "Rows kept for media items", found.num_rows)
        yield GaugeMetricFamily("quire_worker_encoder_cache_items", "Media items whose rows are kept", found.num_items)
        text = "Rows of media items that can be kept; 0: no encoder"
        yield GaugeMetricFamily("quire_worker_encoder_cache_capacity_rows", text, found.capacity)


class StatusCollector(Collector):
    """Gauges derived from the worker's status."""

    def __init__(self, read: Callable[[], admin_pb2.ServiceStatus]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []  # prevents collection at registration, before there is a status

    def collect(self) -> Iterable[Metric]:
        """Yields the gauges of the present status; the age of the last step only after a first step."""
        status = self._read()
        yield GaugeMetricFamily("quire_worker_slots_live", "Sequences that have a slot", status.running)
        yield GaugeMetricFamily("quire_worker_blocks_total", "KV blocks, null block excluded", status.blocks.total)
        yield GaugeMetricFamily("quire_worker_blocks_used", "KV blocks owned by live slots", status.blocks.used)
        yield GaugeMetricFamily(
            "quire_worker_blocks_held", "KV blocks of known content owned by no slot", status.blocks.cached
        )
        yield GaugeMetricFamily("quire_worker_epoch", "Epoch of the current attachment; 0: none", status.epoch)
        yield GaugeMetricFamily("quire_worker_ranks", "Processes that the model is split across", status.num_ranks)
        yield GaugeMetricFamily("quire_worker_stages", "Pipeline stages", status.num_stages)
        text = "Context-parallel groups"
        yield GaugeMetricFamily("quire_worker_contexts", text, status.num_contexts)
        if status.HasField("last_step_age_s"):
            yield GaugeMetricFamily(
                "quire_worker_last_step_age_seconds", "Seconds since a step last ended", status.last_step_age_s
            )
