"""Admission and prefix cache hits. Numbered scenarios are known ones; tests name differences of Quire."""

from __future__ import annotations

import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.sequences.ending import Reason
from tests.services.scheduler.conftest import count_operations, make_sequence
from tests.services.scheduler.core.steps import NewCore, add, returned, tokens_of


def test_s1_all_that_fit_run_in_order_of_arrival(core: NewCore) -> None:
    c = core()
    add(c, *[10] * 10)
    plan = c.schedule(0)
    assert plan is not None
    assert [a.sequence.key for a in plan.admitted] == list(range(10))
    assert tokens_of(c, plan) == dict.fromkeys(range(10), 10)


def test_s2_running_sequences_are_limited_by_slots(core: NewCore) -> None:
    c = core(max_num_seqs=3)
    add(c, *[10] * 10)
    plan = c.schedule(0)
    assert plan is not None
    assert len(plan.admitted) == 3
    assert len(c.waiting) == 7


def head_that_waits(core: NewCore, num_cached: int) -> Core:
    """Returns a core whose head of the queue waits for room to grow; `num_cached` tokens of its prompt are cached."""
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


def test_the_match_of_a_waiting_head_is_kept_between_steps(core: NewCore) -> None:
    short, long = head_that_waits(core, 160), head_that_waits(core, 4800)
    costs = [count_operations(lambda c=c: c.schedule(0)) for c in (short, long)]
    assert costs[1] < 1.5 * costs[0]


def test_the_match_of_a_waiting_head_follows_the_cache(core: NewCore) -> None:
    c = head_that_waits(core, 4800)
    sequence = c.waiting.peek()
    assert c.num_cached(sequence) == 4800
    evicted = c.kv.pool.allocate(c.kv.pool.num_free - 100)
    anew = len(c.kv.match(sequence.block_hashes).blocks)
    assert 0 < anew < 300
    assert c.num_cached(sequence) == 16 * anew
    c.kv.pool.record_hash(evicted[0], sequence.block_hashes[anew])
    assert c.num_cached(sequence) == 16 * (anew + 1)


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
    """Other engines compute a whole block again, because the last token's logits are needed. Here its KV stays, and
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


def test_p13_sequences_that_skip_the_cache_still_fill_it(core: NewCore) -> None:
    c = core(enable_prefix_caching=True)
    for key in range(2):
        c.add(make_sequence(key, list(range(48)), max_tokens=1, skip_reading_prefix_cache=True))
        c.schedule(0)
        returned(c, 5)
    assert c.counts.cached_tokens == 0
    c.add(make_sequence(2, list(range(48)), max_tokens=1))
    c.schedule(0)
    assert c.counts.cached_tokens == 47  # the last is computed again


@pytest.mark.parametrize(
    ("length", "text"), [(100, "maximum model length of 100"), (90, "does not fit in the worker's 5 KV blocks")]
)
def test_a_sequence_that_can_never_run_is_refused_with_a_reason(core: NewCore, length: int, text: str) -> None:
    c = core(num_blocks=6, max_model_len=100)
    add(c, length)
    finished = c.take_events().finished
    assert [f.reason for f in finished] == [Reason.ERROR]
    assert finished[0].failure is not None
    assert text in finished[0].failure.message
    assert not c.has_work
