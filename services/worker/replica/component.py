"""What the parts that a replica has beside its steps have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.services.worker.replica.retained_state import RetainedState
from quire.services.worker.step.plan import StepPlan

PlanHook = Callable[[StepPlan], None]  # called before anything of the plan is done; raises PlanViolation


class ReplicaComponent:
    """A part of a replica beside its steps, which overrides what concerns it. Used by the device's thread."""

    plan_hooks: Sequence[PlanHook] = ()

    def end_epoch(self, report: RetainedState) -> RetainedState:
        """Ends what belongs to the attachment; returns the report with what outlives it."""
        return report

    def reset_cache(self) -> None:
        """Discards what it holds of KV blocks, whose content is of no use any more."""
