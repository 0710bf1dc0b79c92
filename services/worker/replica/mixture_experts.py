"""The experts of a mixture: how many tokens each has had, and how they move between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from quire.services.worker.replica.component import PlanHook, ReplicaComponent
from quire.services.worker.step.plan import StepPlan

if TYPE_CHECKING:  # this module is also read where there is no torch
    from quire.services.worker.ranks.expert_balance import ExpertBalance
    from quire.services.worker.runner.expert_load import LoadByLayer


class MixtureExperts(ReplicaComponent):
    """Experts that stay with their ranks; by default none."""

    def __init__(self, read_load: Callable[[], LoadByLayer] = dict) -> None:
        self.read_load = read_load  # tokens of each expert so far, padding included, by layer that has experts


class BalancedExperts(MixtureExperts):
    """Experts that ranks exchange before steps that all of them know by their number."""

    def __init__(self, read_load: Callable[[], LoadByLayer], balance: ExpertBalance) -> None:
        super().__init__(read_load)
        self.balance = balance
        self.plan_hooks: tuple[PlanHook, ...] = (self._rebalance,)

    def _rebalance(self, plan: StepPlan) -> None:
        self.balance.rebalance_before(plan.step_id)
