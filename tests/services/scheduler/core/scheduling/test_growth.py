"""Token budget of running sequences, and preemption when blocks run out."""

from __future__ import annotations

import numpy as np

from tests.services.scheduler.conftest import UnlimitedForecast
from tests.services.scheduler.core.steps import NewCore, add, returned, tokens_of


def test_s3_long_prompts_share_the_budget_in_chunks(core: NewCore) -> None:
    c = core(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(c, 800, 800, 800)
    assert tokens_of(c, c.schedule(0)) == {0: 400, 1: 400, 2: 224}
    returned(c)
    assert tokens_of(c, c.schedule(0)) == {0: 400, 1: 400, 2: 224}
    returned(c, 1, 1)
    assert tokens_of(c, c.schedule(0)) == {0: 1, 1: 1, 2: 352}


def test_s4_the_prefill_threshold_applies_only_with_other_sequences(core: NewCore) -> None:
    alone = core(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(alone, 2000)
    assert tokens_of(alone, alone.schedule(0)) == {0: 1024}
    together = core(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(together, 2000, 10)
    assert tokens_of(together, together.schedule(0)) == {0: 400, 1: 10}


def test_s5_the_last_prompt_to_fit_is_cut_to_the_budget(core: NewCore) -> None:
    c = core(max_num_batched_tokens=1024, max_num_seqs=3)
    add(c, 800, 800, 10, 10)
    assert tokens_of(c, c.schedule(0)) == {0: 800, 1: 224}


def test_the_newest_is_preempted_first_and_resumed_first(core: NewCore) -> None:
    c = core(num_blocks=5, max_model_len=64)
    c.state.forecast = UnlimitedForecast()
    add(c, 16, 16, max_tokens=40)
    c.schedule(0)
    returned(c, 5, 5)
    c.schedule(0)  # each takes its second block: none is left
    returned(c, 5, 5)
    for _ in range(15):
        c.schedule(0)
        returned(c, 5, 5)
    assert c.use.free == 0
    add(c, 10, first=2)
    assert tokens_of(c, c.schedule(0)) == {0: 1}
    assert [s.key for s in c.waiting] == [1, 2]
    assert c.counts.preemptions == 1


def test_a_preempted_sequence_keeps_its_token_in_flight(core: NewCore) -> None:
    c = core(max_steps_in_flight=2)
    add(c, 10, max_tokens=3)
    c.schedule(0)
    c.schedule(0)
    c.preempt(0)
    assert c.schedule(0) is None, "its tokens are still to come"
    returned(c, 71)
    assert c.schedule(0) is None
    returned(c, 72)
    plan = c.schedule(0)
    assert plan is not None
    assert np.frombuffer(plan.admitted[0].token_ids, dtype=np.int32)[-2:].tolist() == [71, 72]
    assert [t for columns in c.take_events().tokens for t in columns.token_ids.tolist()] == [71, 72]


def test_a_steady_decode_plan_names_no_slot(core: NewCore) -> None:
    c = core()
    add(c, *[10] * 8)
    c.schedule(0)
    returned(c, *[5] * 8)
    plan = c.schedule(0)
    assert plan is not None
    assert plan.num_tokens == 8
    assert (plan.admitted, plan.released_slots, plan.counted_slots, plan.new_block_ids) == ([], [], [], [])
