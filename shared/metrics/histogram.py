"""Fast histogram for values that are observed several times per step or per request.

The client library's own histogram takes a lock twice and scans its buckets for each value: 3 us, of which a
scheduler's step has six and a frontend's request fourteen. This one has one writer thread; the page's thread may
read a value in the sum that is not yet in its bucket, which the next scrape corrects.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector


class Series:
    """Bucket counts and sum for one set of label values."""

    __slots__ = ("_edges", "counts", "total")

    def __init__(self, edges: Sequence[float]) -> None:
        self._edges = edges
        self.counts = [0] * (len(edges) + 1)  # the last bucket counts values above all edges
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self._edges, value)] += 1
        self.total += value


class Histogram(Collector):
    """Histogram metric. Callers keep the result of `labels(...)`; without labels, use `observe`."""

    def __init__(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float],
        registry: CollectorRegistry,
    ) -> None:
        self._name, self._documentation, self.label_names = name, documentation, tuple(labels)
        self._edges = tuple(buckets)
        self._series: dict[tuple[str, ...], Series] = {}
        if not labels:
            self.observe = self.labels().observe
        registry.register(self)

    def labels(self, *values: str) -> Series:
        assert len(values) == len(self.label_names), f"{self._name} has the labels {self.label_names}, got {values}"
        return self._series.setdefault(values, Series(self._edges))

    def describe(self) -> Iterable[Metric]:
        return [HistogramMetricFamily(self._name, self._documentation, labels=self.label_names)]

    def collect(self) -> Iterable[Metric]:
        """Returns the metric with all series, their bucket counts cumulated; called by the page's thread."""
        family = HistogramMetricFamily(self._name, self._documentation, labels=self.label_names)
        names = [*(str(float(edge)) for edge in self._edges), "+Inf"]
        for values, series in list(self._series.items()):
            so_far, buckets = 0, []
            for name, count in zip(names, list(series.counts), strict=True):
                so_far += count
                buckets.append((name, so_far))
            family.add_metric(values, buckets, series.total)
        return [family]
