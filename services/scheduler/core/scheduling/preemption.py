"""Preemption when KV blocks are short."""

from __future__ import annotations

from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder


def preempt_for_blocks(state: CoreState, builder: PlanBuilder) -> None:
    """Preempts the policy's victim, possibly the sequence that needs blocks, and removes its slots from the step.
    Always marks the step as short of blocks, so that it admits nothing; preempts nothing while blocks of steps in
    flight are about to be released, or if the victim is a beam moved in this step."""
    builder.short_of_blocks = True
    if state.kv.num_fenced:
        return
    victim = state.waiting.victim(state.running)
    if not builder.has_beam_move(victim):  # beams that were moved in this step must stay
        for slot in state.preempt(victim):
            builder.remove_slot(slot)
