"""Helpers to plan, read and apply steps of a core.

Defaults: prompts of 10 tokens, 16 output tokens, block size 16, budget 8192, 16 slots, 10,000 blocks, no caching.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepPlan, StepResult
from tests.services.scheduler.conftest import make_sequence

EOS = 50256
NewCore = Callable[..., Core]


def tokens_of(core: Core, plan: StepPlan | None) -> dict[int, int]:
    """Returns the tokens that each sequence computes in a step, by key: named and implied ones."""
    assert plan is not None
    counts = dict(zip(plan.counted_slots, plan.token_counts, strict=True))
    for slot in np.flatnonzero(core.running.live).tolist():
        counts.setdefault(slot, 0)
    unnamed = plan.num_tokens - sum(counts.values())
    for slot in core.steps_in_flight[-1].slots.tolist():
        if slot not in plan.counted_slots:
            counts[slot], unnamed = 1, unnamed - 1
    assert unnamed == 0
    return {core.running.sequence(slot).key: count for slot, count in counts.items()}


def returned(core: Core, *tokens: int) -> None:
    """Applies the oldest step in flight with these tokens."""
    core.apply(StepResult(core.steps_in_flight[0].step_id, np.array(tokens, dtype=np.int32)), now=0)


def add(core: Core, *lengths: int, first: int = 0, **fields: object) -> None:
    for key, length in enumerate(lengths, first):
        core.add(make_sequence(key, [key * 1000 + i for i in range(length)], block_size=16, **fields))
