"""Metrics of the batches that a frontend runs."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

ENDINGS = ("completed", "failed", "cancelled", "expired")
OUTCOMES = ("completed", "failed")


class BatchMetrics:
    """Outcomes of batches and their requests. A batch that moves to another frontend is counted where it ends, its
    requests where they were answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ended = Counter(
            "quire_frontend_batches_ended", "Batches that ended on this frontend", ["status"], registry=registry
        )
        self.ended = {status: ended.labels(status) for status in ENDINGS}
        requests = Counter(
            "quire_frontend_batch_requests",
            "Answered requests of batches; failed: answered with an error, which is written to the error file",
            ["outcome"],
            registry=registry,
        )
        self.requests = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
