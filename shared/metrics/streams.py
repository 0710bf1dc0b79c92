"""Metrics of a frontend's resumable streams."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

ENDS = ("finished", "cancelled", "unread", "failed", "elsewhere")
REFUSALS = ("full", "taken", "not_found", "redis_away")


class StreamMetrics:
    """Counters and gauges of resumable streams. Every stream that starts on, or is taken over by, this frontend is
    either produced here or counted as ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.known = self._gauge("streams", "Resumable streams that this frontend produces, stores or follows")
        self.made = self._gauge("streams_made", "Resumable streams in progress that this frontend produces")
        self.num_bytes = self._gauge("stream_bytes", "Memory of this frontend used by resumable streams")
        self.readers = self._gauge("stream_readers", "Clients that read a resumable stream here or query its progress")
        self.of_all = self._gauge("streams_kept", "Resumable streams stored in Redis, over all tenants and frontends")
        self.bytes_of_all = self._gauge("stream_kept_bytes", "Size of their messages and requests in Redis")
        self.begun = self._counter("streams_begun", "Resumable streams started on this frontend")
        self.attaches = self._counter("stream_attaches", "Attach calls that resumed reading a stream")
        self.takeovers = self._counter("stream_takeovers", "Streams taken over from a lost frontend")
        self.unkept = self._counter("streams_unkept", "Times that a stream continued although Redis could not store it")
        ended = self._counter(
            "streams_ended",
            "Streams that this frontend no longer produces; unread: no reader within the retention time",
            "reason",
        )
        self.ended = {reason: ended.labels(reason) for reason in ENDS}
        refused = self._counter(
            "streams_refused", "Resumable requests and readers refused because of stream limits or state", "reason"
        )
        self.refused = {reason: refused.labels(reason) for reason in REFUSALS}

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"quire_frontend_{name}", documentation, registry=self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"quire_frontend_{name}", documentation, labels, registry=self._registry)
