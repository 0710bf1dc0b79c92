"""Reports of the memory that a frontend's streams use, which bound what a tenant may store in the cluster."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from quire.services.frontend.streams.local_stream import LocalStream
from quire.services.frontend.streams.store import StoreUnavailable, StreamStore, StreamUsage
from quire.shared.metrics.streams import StreamMetrics


async def report_usage(store: StreamStore, streams: Iterable[LocalStream], metrics: StreamMetrics) -> None:
    """Reports the memory use of local streams to the store; that of an ended stream for a last time."""
    reported = [local for local in streams if not local.producer.is_usage_final]
    uses = [StreamUsage(local.stream.key, local.stream.memory_bytes, local.producer.ttl_ms) for local in reported]
    ended = [local for local in reported if not local.producer.needs_renewal and local.stream.has_ended]
    with suppress(StoreUnavailable):
        total = await store.report_usage(uses)
        for local in ended:
            local.producer.is_usage_final = True
        metrics.of_all.set(total.num_streams)
        metrics.bytes_of_all.set(total.num_bytes)
