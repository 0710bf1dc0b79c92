"""Metrics as Python values: the result of `LLM.get_metrics()`, in classes that vLLM users know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prometheus_client.core import Metric as Parsed
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True)
class Metric:
    """One series: name and labels. `labels["service"]` is the process it comes from."""

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """A monotonically increasing value."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """A current value."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Observations by bucket: `buckets` maps each upper edge as text (the last is "+Inf") to the number of
    observations up to it."""

    count: int = 0
    sum: float = 0.0
    buckets: dict[str, int] = field(default_factory=dict)


def parse(text: str) -> list[Metric]:
    """Parses a page in Prometheus's text format; metrics of unknown types are skipped."""
    return [metric for family in text_string_to_metric_families(text) for metric in _metrics_of_family(family)]


def _metrics_of_family(family: Parsed) -> Iterator[Metric]:
    """Yields the metrics of one family in vLLM's classes: histograms per label set, counters without their _created
    samples, gauges; other types are skipped."""
    if family.type == "histogram":
        yield from _histograms(family)
    elif family.type == "counter":
        yield from (Counter(s.name, dict(s.labels), s.value) for s in family.samples if s.name.endswith("_total"))
    elif family.type == "gauge":
        yield from (Gauge(s.name, dict(s.labels), s.value) for s in family.samples)


def _histograms(family: Parsed) -> Iterator[Metric]:
    """Groups a family's samples by their labels except `le` and yields one histogram each; buckets stay cumulative."""
    series: dict[tuple[tuple[str, str], ...], Histogram] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(sorted(labels.items()))
        known = series.get(key) or Histogram(family.name, labels)
        count, total = known.count, known.sum
        if sample.name.endswith("_bucket"):
            known.buckets[sample.labels["le"]] = int(sample.value)
        elif sample.name.endswith("_count"):
            count = int(sample.value)
        elif sample.name.endswith("_sum"):
            total = sample.value
        series[key] = Histogram(family.name, labels, count, total, known.buckets)
    yield from series.values()
