"""Metrics of the pictures that a frontend processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from quire.shared.metrics.base import MODEL_LABELS


class MediaStatus(NamedTuple):
    """State of a frontend's media store and its decoders."""

    queries: int  # items that prompts needed
    hits: int  # those that were in the store
    waiting: int  # pictures that wait for a decoder process or are in one
    held_bytes: int  # pixels that requests in flight hold
    idle_bytes: int  # pixels kept for later requests


class MediaCollector(Collector):
    """Collects the state of the media store. `status` reads it."""

    def __init__(self, status: Callable[[], MediaStatus], label_values: Sequence[str]) -> None:
        self._status = status
        self._label_values = label_values

    def collect(self) -> Iterator[Metric]:
        """Yields the counters under vLLM's names, and the gauges of the queue and of bytes."""
        status = self._status()
        for name, text, value in (
            ("vllm:mm_cache_queries", "Media items that prompts needed", status.queries),
            ("vllm:mm_cache_hits", "Media items found in the frontend's store", status.hits),
        ):
            counter = CounterMetricFamily(name, text, labels=MODEL_LABELS)
            counter.add_metric(self._label_values, value)
            yield counter
        text = "Pictures that wait for a decoder process or are in one"
        yield GaugeMetricFamily("quire_frontend_media_waiting", text, value=status.waiting)
        text = "Pixels of media items in the frontend's store: held by requests, or idle"
        bytes_kept = GaugeMetricFamily("quire_frontend_media_bytes", text, labels=("state",))
        bytes_kept.add_metric(("held",), status.held_bytes)
        bytes_kept.add_metric(("idle",), status.idle_bytes)
        yield bytes_kept
