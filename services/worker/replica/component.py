"""Base class of a replica's components beyond its steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.plan import StepPlan

PlanHook = Callable[[StepPlan], None]  # called before a plan is applied; raises PlanViolation


class ReplicaComponent:
    """A component of a replica; subclasses override the hooks that concern them. Used on the device thread."""

    @property
    def plan_hooks(self) -> Sequence[PlanHook]:
        """Hooks that are called before each plan until the next device order."""
        return ()

    def end_epoch(self, report: RetainedState) -> RetainedState:
        """Ends what belongs to the attachment; returns the report extended by what is retained."""
        return report

    def reset_cache(self) -> None:
        """Discards cached KV, whose content is no longer valid."""
