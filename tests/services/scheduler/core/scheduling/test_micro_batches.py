"""Workers with several pipeline stages: micro-batches take turns, and sequences are distributed evenly."""

from __future__ import annotations

import numpy as np

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepPlan
from quire.services.scheduler.core.timing.step_times import PipelineDepth
from tests.services.scheduler.core.steps import NewCore, add, returned


def apply_all(core: Core) -> None:
    while core.steps_in_flight:
        returned(core, *[5] * len(core.steps_in_flight[0].slots))


def planned(core: Core) -> list[StepPlan]:
    plans = []
    while (plan := core.schedule(0)) is not None:
        plans.append(plan)
    return plans


def test_prompts_are_distributed_over_micro_batches(core: NewCore) -> None:
    scheduled = core(num_micro_batches=2, max_steps_in_flight=3)
    add(scheduled, *[10] * 6)
    first, second, third = planned(scheduled)
    assert [len(first.admitted), len(second.admitted), len(third.admitted)] == [3, 3, 0]
    assert {admission.slot % 2 for admission in first.admitted} == {0}
    assert {admission.slot % 2 for admission in second.admitted} == {1}


def test_decode_steps_alternate_between_micro_batches_and_name_no_slot(core: NewCore) -> None:
    scheduled = core(num_micro_batches=3, max_steps_in_flight=4)
    add(scheduled, *[10] * 7, max_tokens=100)
    planned(scheduled)
    apply_all(scheduled)
    plans = planned(scheduled)
    turns = [plan.micro_batch for plan in plans]
    assert sorted(turns[:3]) == [0, 1, 2]
    assert turns[3] == turns[0]
    assert not any(plan.counted_slots for plan in plans)
    assert sorted(plan.num_tokens for plan in plans[:3]) == [2, 2, 3]


def test_an_idle_micro_batch_is_skipped(core: NewCore) -> None:
    scheduled = core(num_micro_batches=2, max_steps_in_flight=3)
    add(scheduled, 10, max_tokens=100)
    assert [plan.micro_batch for plan in planned(scheduled)] == [0, 0, 0]
    add(scheduled, 10, first=1, max_tokens=100)
    returned(scheduled, 5)
    (plan,) = planned(scheduled)
    assert (plan.micro_batch, [admission.slot for admission in plan.admitted]) == (1, [1])


def test_a_sequence_is_scheduled_again_before_its_token_returns(core: NewCore) -> None:
    """The worker feeds the sampled token to the next step itself."""
    scheduled = core(num_micro_batches=2, max_steps_in_flight=3)
    add(scheduled, 10, 10, max_tokens=100)
    plans = planned(scheduled)
    assert [plan.micro_batch for plan in plans] == [0, 1, 0]
    assert scheduled.steps_in_flight[0].slots.tolist() == scheduled.steps_in_flight[2].slots.tolist() == [0]


def test_new_sequences_use_other_micro_batches_when_one_is_full(core: NewCore) -> None:
    scheduled = core(num_micro_batches=2, max_steps_in_flight=3, max_num_seqs=3)
    add(scheduled, *[10] * 5, max_tokens=100)
    planned(scheduled)
    assert np.flatnonzero(scheduled.running.live).tolist() == [0, 1, 2]
    assert scheduled.running.num_free_slots == 0


def test_one_step_per_stage_plus_the_next_is_in_flight() -> None:
    assert [PipelineDepth(0, stages).max_steps for stages in (1, 2, 4)] == [2, 3, 5]
    assert [PipelineDepth(2, stages).max_steps for stages in (1, 2, 4)] == [2, 2, 4]
    assert [PipelineDepth.max_steps_for(0, stages) for stages in (1, 2)] == [3, 4]
