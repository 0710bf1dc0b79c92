"""Load statistics and balancing of mixture-of-experts layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.services.worker.replica.component import PlanHook, ReplicaComponent
from quire.services.worker.step.plan import StepPlan

if TYPE_CHECKING:  # this module is also imported without torch
    from quire.services.worker.ranks.expert_balance import ExpertBalance
    from quire.services.worker.runner.expert_load import LoadByLayer


class MixtureExperts(ReplicaComponent):
    """Experts with a fixed placement; without arguments a model without experts."""

    def __init__(self, read_load: Callable[[], LoadByLayer] = dict) -> None:
        self.read_load = read_load  # tokens per expert so far, including padding, by layer with experts


class BalancedExperts(MixtureExperts):
    """Experts that ranks exchange before agreed steps, to balance their load."""

    def __init__(self, read_load: Callable[[], LoadByLayer], balance: ExpertBalance) -> None:
        super().__init__(read_load)
        self.balance = balance

    @property
    def plan_hooks(self) -> Sequence[PlanHook]:
        return (self._rebalance,)

    def _rebalance(self, plan: StepPlan) -> None:
        """Plan hook: exchanges experts with the other ranks if this step is an agreed one."""
        self.balance.rebalance_before(plan.step_id)
