"""What a worker reports. Steps are counted as they end; gauges are read when the page is asked for."""

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
UTILISATION_OVER_S = 0.25  # of steps
DISK_FAILURES = ("full", "error", "wrong", "late", "busy")
GRAMMAR_OUTCOMES = ("compiled", "cached", "failed")


class StepTimings(Protocol):
    """What a step took on the device."""

    @property
    def prepare_us(self) -> int: ...

    @property
    def forward_us(self) -> int: ...

    @property
    def sample_us(self) -> int: ...


class StepOutcome(Protocol):
    """What came of a step."""

    @property
    def wait_us(self) -> int:
        """From the arrival of its plan to its launch."""

    @property
    def timings(self) -> StepTimings: ...

    @property
    def token_ids(self) -> Sized: ...

    @property
    def failures(self) -> Sized: ...


class GrammarOutcome(Protocol):
    """What came of a grammar that was asked for."""

    @property
    def error(self) -> object | None: ...

    @property
    def compile_us(self) -> int:
        """0: it was there."""


class Peak(NamedTuple):
    """What a device can do in a second; 0: unknown."""

    flops: float
    bytes: float


class StepCost(NamedTuple):
    """What a step takes at least, by the model's sizes."""

    flops: float
    weight_bytes: float
    kv_read_bytes: float
    kv_written_bytes: float

    def plus(self, other: StepCost) -> StepCost:
        return StepCost(*map(add, self, other))


NO_COST = StepCost(0.0, 0.0, 0.0, 0.0)


class StepTotals(Collector):
    """What steps have come to. It changes with every step, so these are plain numbers of the event loop, which the
    page's thread reads: seven locked values of prometheus_client cost a step 6 us."""

    def __init__(self) -> None:
        self.computed = self.sampled = 0
        self.cost, self.busy_s = NO_COST, 0.0

    def collect(self) -> Iterable[Metric]:
        for name, text, value in (
            ("tokens_computed", "Tokens run through the model", self.computed),
            ("tokens_sampled", "Tokens sampled", self.sampled),
            ("step_busy_seconds", "Time in forward passes and in choosing tokens", self.busy_s),
            (
                "model_flops",
                "Floating-point operations that the steps took at least, by the model's sizes",
                self.cost.flops,
            ),
        ):
            yield CounterMetricFamily(f"quire_worker_{name}", text, value=value)
        text = "Bytes of memory that the steps moved at least, by the model's sizes"
        moved = CounterMetricFamily("quire_worker_model_bytes", text, labels=["what"])
        for what, num_bytes in zip(MOVED, self.cost[1:], strict=True):
            moved.add_metric([what], num_bytes)
        yield moved


class DiskMetrics:
    """Of KV blocks on disk. Any thread tells."""

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

    def read(self, num_bytes: int) -> None:
        self._read.inc(num_bytes)

    def failed(self, what: str, reason: str) -> None:
        self._failures.labels(what, reason).inc()


class WorkerMetrics:
    """Counted as it happens."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        phases = Histogram(
            "quire_worker_step_phase_seconds",
            "Parts of a step: waiting for the step before, building inputs, forward pass, choosing tokens",
            ["phase"],
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self._observe_phases = [phases.labels(phase).observe for phase in PHASES]
        self._totals = StepTotals()
        registry.register(self._totals)
        self.failures = Counter("quire_worker_slot_failures", "Sequences that could not go on", registry=registry)
        self.adapters_left_out = Counter(
            "quire_worker_adapters_left_out", "Adapters of --lora whose file is damaged", registry=registry
        )
        self.kv_sent = Counter("quire_worker_kv_sent_bytes", "KV that other workers got", registry=registry)
        self.kv_received = Counter(
            "quire_worker_kv_received_bytes", "KV that came from other workers", registry=registry
        )
        self.kv_fetches_failed = Counter(
            "quire_worker_kv_fetches_failed", "Fetches of KV that did not come", registry=registry
        )
        self.disk = DiskMetrics(registry)
        self.attached = Counter("quire_worker_attached", "Attachments to a scheduler", registry=registry)
        self.broken = Counter(
            "quire_worker_sessions_broken", "Attachments ended because something was wrong", registry=registry
        )
        self.grammar_compile = Histogram(
            "quire_worker_grammar_compile_seconds",
            "Compiling a grammar for constrained outputs",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.mask_fill = Histogram(
            "quire_worker_mask_fill_seconds",
            "Filling the grammar masks of a step, beside the device's work",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.mask_wait = Histogram(
            "quire_worker_mask_wait_seconds",
            "What launching a step waited for its grammar masks",
            buckets=STEP_BUCKETS,
            registry=registry,
        )
        self.grammars = Counter(
            "quire_worker_grammars_prepared", "Grammars asked for, by what came of it", ["outcome"], registry=registry
        )
        for outcome in GRAMMAR_OUTCOMES:
            self.grammars.labels(outcome)
        self._add_costs(registry)

    def _add_costs(self, registry: CollectorRegistry) -> None:
        self._peak_flops = Gauge(
            "quire_worker_peak_flops_per_second", "Of the device, as its maker states; 0: unknown", registry=registry
        )
        self._peak_bandwidth = Gauge(
            "quire_worker_peak_bytes_per_second", "Of its memory, as its maker states; 0: unknown", registry=registry
        )
        self._utilisation = Gauge(
            "quire_worker_model_flops_utilisation",
            "Operations of the last steps, over what the device could have done meanwhile; 0: unknown",
            registry=registry,
        )
        self._bandwidth = Gauge(
            "quire_worker_model_bandwidth_utilisation",
            "Bytes of the last steps, over what the memory could have moved meanwhile; 0: unknown",
            registry=registry,
        )
        self._peak = Peak(0.0, 0.0)
        self._told, self._told_s = NO_COST, 0.0  # of the totals, when utilisation was last told

    def set_peak(self, peak: Peak) -> None:
        self._peak = peak
        self._peak_flops.set(peak.flops)
        self._peak_bandwidth.set(peak.bytes)

    def grammar_prepared(self, prepared: GrammarOutcome) -> None:
        if prepared.error is not None:
            self.grammars.labels("failed").inc()
        else:
            self.grammars.labels("compiled" if prepared.compile_us else "cached").inc()
        if prepared.compile_us:
            self.grammar_compile.observe(prepared.compile_us * MICROSECOND)

    def observe_mask_fill(self, seconds: float) -> None:
        self.mask_fill.observe(seconds)

    def observe_mask_wait(self, seconds: float) -> None:
        self.mask_wait.observe(seconds)

    def observe_step(self, result: StepOutcome, num_tokens: int, cost: StepCost) -> None:
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
        if totals.busy_s - self._told_s >= UTILISATION_OVER_S:
            self._tell_utilisation(totals.cost, totals.busy_s)
        if result.failures:
            self.failures.inc(len(result.failures))

    def _tell_utilisation(self, cost: StepCost, busy_s: float) -> None:
        """Of the steps since it was told last."""
        seconds = busy_s - self._told_s
        if self._peak.flops:
            self._utilisation.set((cost.flops - self._told.flops) / seconds / self._peak.flops)
        if self._peak.bytes:
            self._bandwidth.set((sum(cost[1:]) - sum(self._told[1:])) / seconds / self._peak.bytes)
        self._told, self._told_s = cost, busy_s


class ExpertLoadCollector(Collector):
    """How evenly the layers of a mixture of experts are used; nothing for other models."""

    def __init__(self, read: Callable[[], Mapping[int, Iterable[int]]]) -> None:
        """`read`: by layer, how many tokens each expert has had."""
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterable[Metric]:
        tokens = CounterMetricFamily(
            "quire_worker_expert_tokens", "Tokens that experts of a layer computed, padding included", labels=["layer"]
        )
        busiest = GaugeMetricFamily(
            "quire_worker_expert_busiest_ratio",
            "Tokens of a layer's busiest expert, over the mean of its experts, since the start",
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


class StatusCollector(Collector):
    """Gauges out of the worker's own status."""

    def __init__(self, read: Callable[[], admin_pb2.ServiceStatus]) -> None:
        self._read = read

    def describe(self) -> Iterable[Metric]:
        return []  # keeps registration from asking for a page before there is a status

    def collect(self) -> Iterable[Metric]:
        status = self._read()
        yield GaugeMetricFamily("quire_worker_slots_live", "Sequences that have a slot", status.running)
        yield GaugeMetricFamily("quire_worker_blocks_total", "KV blocks, null block excluded", status.blocks.total)
        yield GaugeMetricFamily("quire_worker_blocks_used", "KV blocks owned by live slots", status.blocks.used)
        yield GaugeMetricFamily(
            "quire_worker_blocks_held", "KV blocks of known content owned by no slot", status.blocks.cached
        )
        yield GaugeMetricFamily("quire_worker_epoch", "Present attachment; 0: none", status.epoch)
        yield GaugeMetricFamily("quire_worker_ranks", "Processes that the model is cut into", status.num_ranks)
        yield GaugeMetricFamily("quire_worker_stages", "Stages that its layers are shared out among", status.num_stages)
        text = "Groups of ranks that long prompts are shared out among"
        yield GaugeMetricFamily("quire_worker_contexts", text, status.num_contexts)
        if status.HasField("last_step_age_s"):
            yield GaugeMetricFamily("quire_worker_last_step_age_seconds", "Since a step ended", status.last_step_age_s)
