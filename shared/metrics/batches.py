"""Batches that a frontend runs: how they and their requests ended here."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

ENDINGS = ("completed", "failed", "cancelled", "expired")
OUTCOMES = ("completed", "failed")


class BatchMetrics:
    """A batch that goes on at another frontend is counted where it ends; its requests where they were answered."""

    def __init__(self, registry: CollectorRegistry) -> None:
        ended = Counter("quire_frontend_batches_ended", "Batches that ended here", ["status"], registry=registry)
        self.ended = {status: ended.labels(status) for status in ENDINGS}
        requests = Counter(
            "quire_frontend_batch_requests",
            "Requests of batches answered; failed: with an error, which is a line of the error file",
            ["outcome"],
            registry=registry,
        )
        self.requests = {outcome: requests.labels(outcome) for outcome in OUTCOMES}
