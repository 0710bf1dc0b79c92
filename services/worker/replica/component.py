"""What the parts that a replica has beside its steps have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from quire.services.worker.replica.held_report import HeldReport
from quire.services.worker.step.plan import StepPlan

Gate = Callable[[StepPlan], None]  # called before anything of the plan is done; raises PlanViolation


class ReplicaComponent:
    """A part of a replica beside its steps, which overrides what concerns it. Used by the device's thread."""

    gates: Sequence[Gate] = ()

    def end_epoch(self, report: HeldReport) -> HeldReport:
        """Ends what belongs to the attachment; returns the report with what outlives it."""
        return report

    def forget_cache(self) -> None:
        """Discards what it holds of KV blocks, whose content is of no use any more."""
