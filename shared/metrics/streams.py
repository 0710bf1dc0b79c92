"""Resumable streams of a frontend: those that begin, end, are taken up again, gone on with, or refused."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge

ENDS = ("finished", "cancelled", "unread", "failed", "elsewhere")
REFUSALS = ("full", "taken", "not_found", "redis_away")


class StreamMetrics:
    """What was begun or taken over here either has ended here or is being made here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self.known = self._gauge("streams", "Resumable streams that are made, kept or followed here")
        self.made = self._gauge("streams_made", "Resumable streams that have not ended and are made here")
        self.num_bytes = self._gauge("stream_bytes", "What resumable streams take of this frontend's memory")
        self.readers = self._gauge("stream_readers", "Who reads resumable streams here, or asks how far one is")
        self.of_all = self._gauge("streams_kept", "Resumable streams in Redis, of all tenants and frontends")
        self.bytes_of_all = self._gauge("stream_kept_bytes", "What these take of it: their messages and requests")
        self.begun = self._counter("streams_begun", "Resumable streams that were begun here")
        self.attaches = self._counter("stream_attaches", "Times that a stream was taken up again")
        self.takeovers = self._counter("stream_takeovers", "Streams gone on with here, whose maker was gone")
        self.unkept = self._counter("streams_unkept", "Times that a stream went on though Redis could not keep it")
        ended = self._counter(
            "streams_ended",
            "Streams that are not made here any more; unread: nobody came within the retention",
            "reason",
        )
        self.ended = {reason: ended.labels(reason) for reason in ENDS}
        refused = self._counter(
            "streams_refused", "Resumable requests and readers that were refused for reasons of streams", "reason"
        )
        self.refused = {reason: refused.labels(reason) for reason in REFUSALS}

    def _gauge(self, name: str, documentation: str) -> Gauge:
        return Gauge(f"quire_frontend_{name}", documentation, registry=self._registry)

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(f"quire_frontend_{name}", documentation, labels, registry=self._registry)
