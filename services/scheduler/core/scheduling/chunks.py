"""Sizes of prompt chunks within a step's budget."""

from __future__ import annotations

from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import PlanBuilder


def chunk_size(state: CoreState, builder: PlanBuilder, num_remaining: int) -> int:
    """Takes tokens of a prompt from the step's budget: at most `num_remaining`, and at most
    long_prefill_token_threshold if other sequences are present. Returns the number of tokens of this step's chunk,
    possibly 0."""
    threshold = state.limits.long_prefill_token_threshold
    alone = len(state.sequences) == 1
    at_most = num_remaining if threshold == 0 or alone or state.limits.whole_prompts else threshold
    return builder.budget.try_add(num_remaining, at_most)
