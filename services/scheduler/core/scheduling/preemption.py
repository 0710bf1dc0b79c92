"""Preemption when KV blocks are short."""

from __future__ import annotations

from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder


def preempt_for_blocks(state: CoreState, builder: PlanBuilder) -> None:
    """Preempts a sequence, possibly the one that needs blocks, unless blocks of steps in flight are about to be
    released anyway."""
    builder.short_of_blocks = True
    if state.kv.num_fenced:
        return
    victim = state.waiting.victim(state.running)
    if not builder.has_beam_move(victim):  # beams that were moved in this step must stay
        for slot in state.preempt(victim):
            builder.remove_slot(slot)
