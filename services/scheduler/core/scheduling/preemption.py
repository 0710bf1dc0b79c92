"""Preemption where blocks are short."""

from __future__ import annotations

from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder


def preempt_for_blocks(state: CoreState, builder: PlanBuilder) -> None:
    """Preempts a sequence, which may be the one in need, unless blocks are about to come back anyway."""
    builder.short_of_blocks = True
    if state.kv.num_fenced:
        return
    victim = state.waiting.victim(state.running)
    if not builder.has_beam_move(victim):  # beams that have just moved must stay
        for slot in state.preempt(victim):
            builder.remove_slot(slot)
