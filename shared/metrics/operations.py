"""What operators have done to workers, by what came of it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

LOAD_OUTCOMES = ("loaded", "refused", "lost")
UPDATE_OUTCOMES = ("updated", "failed", "dropped")


class OperationMetrics:
    """All series are there from the start: one that begins at its first event hides that from increase()."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loads = Counter(
            "quire_scheduler_adapter_loads",
            "Orders to a worker to load an adapter that have ended; lost: the worker was gone before it said how",
            ["outcome"],
            registry=registry,
        )
        self.adapter_loads = {outcome: loads.labels(outcome) for outcome in LOAD_OUTCOMES}
        updates = Counter(
            "quire_scheduler_weight_updates",
            "Updates of weights that were asked for; dropped: the caller left, or another scheduler's workers refused",
            ["outcome"],
            registry=registry,
        )
        self.weight_updates = {outcome: updates.labels(outcome) for outcome in UPDATE_OUTCOMES}
