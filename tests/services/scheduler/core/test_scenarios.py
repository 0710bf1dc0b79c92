"""Known scheduling scenarios, with their numbers. Where Quire differs on purpose, the test says so.

Defaults: prompts of 10 tokens, 16 output tokens, block size 16, budget 8192, 16 slots, 10,000 blocks, no caching.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from services.scheduler.core.core import Core
from services.scheduler.core.ending import Failure, Reason
from services.scheduler.core.plan import Logprobs, StepPlan, StepResult
from tests.services.scheduler.conftest import Optimist, count_operations, make_sequence

EOS = 50256
NewCore = Callable[..., Core]


def tokens_of(core: Core, plan: StepPlan | None) -> dict[int, int]:
    """Tokens that each sequence computes in a step, by key: what the plan says and what it implies."""
    assert plan is not None
    counts = dict(zip(plan.counted_slots, plan.token_counts, strict=True))
    for slot in np.flatnonzero(core.running.live).tolist():
        counts.setdefault(slot, 0)
    unnamed = plan.num_tokens - sum(counts.values())
    for slot in core.flights[-1].slots.tolist():
        if slot not in plan.counted_slots:
            counts[slot], unnamed = 1, unnamed - 1
    assert unnamed == 0
    return {core.running.sequence(slot).key: count for slot, count in counts.items()}


def returned(core: Core, *tokens: int) -> None:
    """The oldest step returns these tokens."""
    core.apply(StepResult(core.flights[0].step_id, np.array(tokens, dtype=np.int32)), now=0)


def add(core: Core, *lengths: int, first: int = 0, **fields: object) -> None:
    for key, length in enumerate(lengths, first):
        core.add(make_sequence(key, [key * 1000 + i for i in range(length)], block_size=16, **fields))


def test_s1_all_that_fit_run_in_order_of_arrival(core: NewCore) -> None:
    c = core()
    add(c, *[10] * 10)
    plan = c.schedule(0)
    assert plan is not None
    assert [a.sequence.key for a in plan.admitted] == list(range(10))
    assert tokens_of(c, plan) == dict.fromkeys(range(10), 10)


def test_s2_no_more_run_than_there_are_slots(core: NewCore) -> None:
    c = core(max_num_seqs=3)
    add(c, *[10] * 10)
    plan = c.schedule(0)
    assert plan is not None
    assert len(plan.admitted) == 3
    assert len(c.waiting) == 7


def head_that_waits(core: NewCore, num_cached: int) -> Core:
    """Of a queue, for room to grow; so many tokens of its prompt are cached."""
    c = core(num_blocks=600, max_model_len=12_000, max_num_batched_tokens=12_000, enable_prefix_caching=True)
    prompt = list(range(num_cached))
    c.add(make_sequence(0, prompt, 1))
    c.schedule(0)
    returned(c, 5)
    c.add(make_sequence(1, [7] * 3000, 9000))
    c.schedule(0)
    returned(c, 5)
    c.add(make_sequence(2, [*prompt, 1, 2, 3], 9000 - num_cached))
    c.schedule(0)
    returned(c, 5)
    assert len(c.waiting) == 1
    return c


def test_a_head_that_does_not_fit_is_not_looked_up_from_the_start_in_every_step(core: NewCore) -> None:
    short, long = head_that_waits(core, 160), head_that_waits(core, 4800)
    costs = [count_operations(lambda c=c: c.schedule(0)) for c in (short, long)]
    assert costs[1] < 1.5 * costs[0]


def test_a_head_that_waits_sees_what_the_cache_gains_and_loses(core: NewCore) -> None:
    c = head_that_waits(core, 4800)
    sequence = c.waiting.peek()
    assert c.num_cached(sequence) == 4800
    evicted = c.kv.pool.allocate(c.kv.pool.num_free - 100)
    anew = len(c.kv.match(sequence.block_hashes).blocks)
    assert 0 < anew < 300
    assert c.num_cached(sequence) == 16 * anew
    c.kv.pool.name(evicted[0], sequence.block_hashes[anew])
    assert c.num_cached(sequence) == 16 * (anew + 1)


def test_s3_long_prompts_share_the_budget_in_chunks(core: NewCore) -> None:
    c = core(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    add(c, 800, 800, 800)
    assert tokens_of(c, c.schedule(0)) == {0: 400, 1: 400, 2: 224}
    returned(c)
    assert tokens_of(c, c.schedule(0)) == {0: 400, 1: 400, 2: 224}
    returned(c, 1, 1)
    assert tokens_of(c, c.schedule(0)) == {0: 1, 1: 1, 2: 352}


def test_s4_the_threshold_binds_only_in_company(core: NewCore) -> None:
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


@pytest.mark.parametrize(
    ("fields", "returns", "reason", "stop_token", "outputs"),
    [
        ({"eos_token_ids": (EOS,)}, [EOS], Reason.STOP, None, [EOS]),
        ({"stop_token_ids": (42, 43)}, [10, 42, 12], Reason.STOP, 42, [10, 42]),
        ({"max_tokens": 2}, [10, 11, 12], Reason.LENGTH, None, [10, 11]),
        ({"stop_token_ids": (7, 8, 9, 43, 44)}, [44], Reason.STOP, 44, [44]),
    ],
)
def test_s12_what_ends_a_sequence(
    core: NewCore,
    fields: dict[str, object],
    returns: list[int],
    reason: Reason,
    stop_token: int | None,
    outputs: list[int],
) -> None:
    c = core()
    add(c, 10, **fields)
    got: list[int] = []
    for token in returns:
        if c.schedule(0) is None:
            break
        returned(c, token)
        got += c.state.events.tokens.pop().token_ids.tolist()
    events = c.take_events()
    assert [(f.reason, f.stop_token_id) for f in events.finished] == [(reason, stop_token)]
    assert got == outputs
    assert c.use.used == 0


def test_s12_an_end_token_that_is_ignored_does_not_end(core: NewCore) -> None:
    c = core()
    add(c, 10)  # ignore_eos: the frontend sends no end tokens
    c.schedule(0)
    returned(c, EOS)
    assert not c.take_events().finished


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_s20_no_step_is_planned_past_a_certain_end(core: NewCore, max_tokens: int, in_flight: int) -> None:
    c = core(max_steps_in_flight=in_flight)
    add(c, *[10] * 4, max_tokens=max_tokens)
    while c.has_work:
        while c.schedule(0) is not None:
            pass
        returned(c, *[5] * len(c.flights[0].slots))
    assert c.counts.scheduled_tokens == 4 * (10 + max_tokens - 1)


def test_s23_hits_are_counted_once_at_the_first_admission(core: NewCore) -> None:
    c = core(enable_prefix_caching=True)
    c.add(make_sequence(0, list(range(48)), max_tokens=1))
    c.schedule(0)
    returned(c, 5)
    c.add(make_sequence(1, [*range(32), *range(100, 116)]))
    c.schedule(0)
    assert (c.counts.prompt_tokens, c.counts.cached_tokens) == (96, 32)
    returned(c, 5)
    c.preempt(int(c.running.order.argmax()))
    c.schedule(0)
    assert (c.counts.prompt_tokens, c.counts.cached_tokens) == (96, 32)
    assert c.counts.resumed_tokens == 49
    assert c.counts.resumed_cached_tokens == 48


def test_a_fully_cached_prompt_computes_one_token(core: NewCore) -> None:
    """Others compute a whole block again, because the last token's logits are needed. Here its KV stays as it is, and
    only its query is computed."""
    c = core(enable_prefix_caching=True)
    c.add(make_sequence(0, list(range(48)), max_tokens=1))
    c.schedule(0)
    returned(c, 5)
    c.add(make_sequence(1, list(range(48))))
    plan = c.schedule(0)
    assert plan is not None
    assert plan.num_tokens == 1
    assert plan.admitted[0].num_cached_tokens == 48
    assert plan.counted_slots == []
    assert len(plan.new_block_ids) == 3


def test_equal_prompts_admitted_in_one_step_share_their_blocks(core: NewCore) -> None:
    c = core(enable_prefix_caching=True)
    for key in range(2):
        c.add(make_sequence(key, list(range(40))))
    plan = c.schedule(0)
    assert plan is not None
    assert plan.num_tokens == 40 + 8
    assert plan.new_block_ids == [1, 2, 3, 1, 2, 4]


def test_p13_who_does_not_read_the_cache_fills_it_all_the_same(core: NewCore) -> None:
    c = core(enable_prefix_caching=True)
    for key in range(2):
        c.add(make_sequence(key, list(range(48)), max_tokens=1, skip_reading_prefix_cache=True))
        c.schedule(0)
        returned(c, 5)
    assert c.counts.cached_tokens == 0
    c.add(make_sequence(2, list(range(48)), max_tokens=1))
    c.schedule(0)
    assert c.counts.cached_tokens == 47  # the last is computed again


def test_s24_a_reset_with_running_sequences_needs_their_preemption(core: NewCore) -> None:
    c = core(enable_prefix_caching=True)
    add(c, 20, 20, 20)
    c.schedule(0)
    returned(c, 5, 5, 5)
    assert c.reset_prefix_cache() is None
    assert c.reset_prefix_cache(preempt_running=True) == 3
    assert [s.key for s in c.waiting] == [0, 1, 2]
    assert c.use.cached == 0


def test_the_newest_goes_first_when_blocks_run_out_and_comes_back_first(core: NewCore) -> None:
    c = core(num_blocks=5, max_model_len=64)
    c.state.forecast = Optimist()
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


def test_a_preempted_sequence_keeps_the_token_that_was_under_way(core: NewCore) -> None:
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


def test_a_preempted_sequence_can_end_with_the_token_that_was_under_way(core: NewCore) -> None:
    c = core()
    add(c, 10, stop_token_ids=(42,))
    c.schedule(0)
    c.preempt(0)
    returned(c, 42)
    events = c.take_events()
    assert [(f.reason, f.stop_token_id) for f in events.finished] == [(Reason.STOP, 42)]
    assert not c.has_work


def test_a_deadline_ends_waiting_and_running_sequences(core: NewCore) -> None:
    c = core(max_num_seqs=1)
    add(c, 10, 10, deadline=5.0)
    c.schedule(1.0)
    c.schedule(6.0)
    assert [f.reason for f in c.take_events().finished] == [Reason.DEADLINE] * 2
    returned(c, 5)
    assert not c.take_events()
    assert c.use.used == 0


def test_a_cancelled_sequence_frees_its_blocks_when_its_step_returns(core: NewCore) -> None:
    c = core(max_steps_in_flight=2)
    add(c, 10)
    c.schedule(0)
    c.cancel(0)
    c.cancel(0)
    assert [f.reason for f in c.take_events().finished] == [Reason.CANCELLED]
    assert c.use.used == 1
    returned(c, 5)
    assert c.use.used == 0


@pytest.mark.parametrize(
    ("length", "text"), [(100, "maximum model length of 100"), (90, "does not fit in the worker's 5 KV blocks")]
)
def test_what_can_never_run_is_refused_with_a_reason(core: NewCore, length: int, text: str) -> None:
    c = core(num_blocks=6, max_model_len=100)
    add(c, length)
    finished = c.take_events().finished
    assert [f.reason for f in finished] == [Reason.ERROR]
    assert finished[0].failure is not None
    assert text in finished[0].failure.message
    assert not c.has_work


def test_a_slot_the_worker_gave_up_ends_alone(core: NewCore) -> None:
    c = core()
    add(c, 10, 10)
    c.schedule(0)
    failure = Failure("INTERNAL", "not a number")
    c.apply(StepResult(1, np.array([-1, 5], dtype=np.int32), failures=[(0, failure)]), now=0)
    events = c.take_events()
    assert [(f.sequence.key, f.failure) for f in events.finished] == [(0, failure)]
    assert events.tokens[0].sequence_ids.tolist() == [1]


def test_logprobs_go_to_those_who_asked_and_still_run(core: NewCore) -> None:
    c = core()
    for key, asks in enumerate([True, False, True]):
        c.add(make_sequence(key, [key] * 10, asks_logprobs=asks))
    c.schedule(0)
    c.cancel(0)
    entries = Logprobs(
        np.array([2, 3], dtype=np.uint32),
        np.array([1, 2, 3, 4, 5], dtype=np.int32),
        np.array([-1, -2, -3, -4, -5], dtype=np.float32),
        np.array([1, 9], dtype=np.uint32),
    )
    c.apply(StepResult(1, np.array([1, 2, 3], dtype=np.int32), logprobs=entries), now=0)
    columns = c.take_events().tokens[0].logprobs
    assert columns is not None
    assert columns.sequence_ids.tolist() == [2]
    assert columns.entries.token_ids.tolist() == [3, 4, 5]
    assert columns.entries.ranks.tolist() == [9]


def test_a_late_token_brings_its_logprobs(core: NewCore) -> None:
    c = core()
    add(c, 10, asks_logprobs=True)
    c.schedule(0)
    c.preempt(0)
    entries = Logprobs(
        np.array([1], dtype=np.uint32),
        np.array([7], dtype=np.int32),
        np.array([-1], dtype=np.float32),
        np.array([1], dtype=np.uint32),
    )
    c.apply(StepResult(1, np.array([7], dtype=np.int32), logprobs=entries), now=0)
    columns = c.take_events().tokens[0].logprobs
    assert columns is not None
    assert columns.entries.token_ids.tolist() == [7]


def test_a_steady_decode_plan_names_no_slot(core: NewCore) -> None:
    c = core()
    add(c, *[10] * 8)
    c.schedule(0)
    returned(c, *[5] * 8)
    plan = c.schedule(0)
    assert plan is not None
    assert plan.num_tokens == 8
    assert (plan.admitted, plan.released_slots, plan.counted_slots, plan.new_block_ids) == ([], [], [], [])


def test_work_still_to_be_done_is_known_in_tokens(core: NewCore) -> None:
    c = core(max_num_batched_tokens=100, max_num_seqs=2)
    add(c, 150, 60, 30)
    assert c.num_pending_tokens == 240
    c.schedule(0)
    assert c.num_pending_tokens == 140
    c.cancel(2)
    assert c.num_pending_tokens == 110
