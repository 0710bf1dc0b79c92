"""Lists every metric that the services can report, from their own catalogues."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from quire.shared.metrics.cluster_load import GAUGES, ClusterLoadCollector
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.metrics.histogram import Histogram
from quire.shared.metrics.media import MediaStatus
from quire.shared.metrics.scheduler import ClusterCollector, ClusterGauges, DirectoryMetrics, SchedulerMetrics
from quire.shared.metrics.sound import SoundStatus
from quire.shared.metrics.worker import (
    NO_ENCODER_CACHE,
    EncoderCacheCollector,
    ExpertLoadCollector,
    StatusCollector,
    WorkerMetrics,
)
from quire.shared.pb.admin.v1 import admin_pb2 as pb

PROCESS_WIDE = ("process_", "python_")  # prometheus_client's own
SUFFIXES = {
    "counter": ("_total",),
    "gauge": ("",),
    "histogram": ("_bucket", "_count", "_sum"),
    "info": ("_info",),
}


@dataclass(frozen=True, order=True)
class Family:
    """One metric of one service."""

    service: str
    name: str  # as scraped; of a histogram without suffix
    type: str
    labels: tuple[str, ...]
    text: str

    @property
    def series(self) -> tuple[str, ...]:
        """Returns the names that queries use."""
        return tuple(self.name.removesuffix(suffix) + suffix for suffix in SUFFIXES[self.type])


def families() -> list[Family]:
    return sorted(
        family
        for service, registry in (
            ("frontend", _frontend()),
            ("frontend", _frontend_metrics().tenant_registry),
            ("scheduler", _scheduler()),
            ("worker", _worker()),
        )
        for family in _families(service, registry)
    )


def _frontend() -> CollectorRegistry:
    metrics = _frontend_metrics()
    metrics.add_media(lambda: MediaStatus(0, 0, 0, 0, 0))
    metrics.add_sound(lambda: SoundStatus(0, 0, 0))
    return metrics.registry


def _frontend_metrics() -> FrontendMetrics:
    metrics = FrontendMetrics("quire-tiny", 4096)
    metrics.calls.tenant("a")
    metrics.registry.register(ClusterLoadCollector(lambda: dict.fromkeys(GAUGES, 0.0), lambda: ["adapter"], lambda: 1))
    return metrics


def _scheduler() -> CollectorRegistry:
    registry = CollectorRegistry()
    SchedulerMetrics(registry)
    DirectoryMetrics(registry)
    drafts = pb.DraftCounts(num_accepted_tokens_per_pos=[1])
    worker = pb.ServiceStatus(
        role=pb.ROLE_WORKER,
        id="worker-0",
        last_step_age_s=1.0,
        drafts=drafts,
        host_memory=pb.HostMemory(total=1),
        disk=pb.DiskBlocks(total=1),
    )
    registry.register(ClusterCollector(lambda: "quire-tiny", lambda: [worker], lambda: ClusterGauges(0, 0, 16)))
    return registry


def _worker() -> CollectorRegistry:
    registry = CollectorRegistry()
    WorkerMetrics(registry)
    registry.register(ExpertLoadCollector(lambda: {0: (3, 1)}))
    registry.register(EncoderCacheCollector(lambda: NO_ENCODER_CACHE))
    registry.register(StatusCollector(lambda: pb.ServiceStatus(role=pb.ROLE_WORKER, last_step_age_s=1.0)))
    return registry


def _families(service: str, registry: CollectorRegistry) -> Iterator[Family]:
    for collector in registry._collector_to_names:
        if isinstance(collector, MetricWrapperBase | Histogram):
            (metric,) = collector.describe()
            labels = collector.label_names if isinstance(collector, Histogram) else collector._labelnames
            yield _family(service, metric, tuple(labels))
        else:
            for metric in collector.collect():
                yield _family(service, metric, tuple(metric.samples[0].labels) if metric.samples else ())


def _family(service: str, metric: Metric, labels: tuple[str, ...]) -> Family:
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return Family(service, name, metric.type, tuple(label for label in labels if label != "le"), metric.documentation)
