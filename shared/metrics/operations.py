"""Metrics of operators' actions on workers, by outcome."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter

LOAD_OUTCOMES = ("loaded", "refused", "lost")
UPDATE_OUTCOMES = ("updated", "failed", "dropped")


class OperationMetrics:
    """Counters of adapter loads and weight updates. All series exist from the start, because increase() misses the
    first event of a new series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        loads = Counter(
            "quire_scheduler_adapter_loads",
            "Finished orders to load an adapter; lost: the worker disconnected before it answered",
            ["outcome"],
            registry=registry,
        )
        self.adapter_loads = {outcome: loads.labels(outcome) for outcome in LOAD_OUTCOMES}
        updates = Counter(
            "quire_scheduler_weight_updates",
            "Requested weight updates; dropped: the caller disconnected, or another scheduler's workers refused",
            ["outcome"],
            registry=registry,
        )
        self.weight_updates = {outcome: updates.labels(outcome) for outcome in UPDATE_OUTCOMES}
