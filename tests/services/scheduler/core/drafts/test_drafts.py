"""Scheduling with speculative decoding: known scenarios with their numbers, and the reservation of blocks for drafts.

Defaults: prompts of 10 tokens, 16 output tokens, block size 16, budget 8192, 16 slots, 10,000 blocks, no caching.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import Logprobs, StepResult
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from tests.services.scheduler.conftest import make_sequence
from tests.services.scheduler.reference_worker import ReferenceWorker

NewCore = Callable[..., Core]
EOS = 50256


def add(core: Core, *lengths: int, first: int = 0, **fields: object) -> None:
    for key, length in enumerate(lengths, first):
        core.add(make_sequence(key, [key * 1000 + i for i in range(length)], block_size=16, **fields))  # type: ignore[arg-type]


def u32(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def knows_few_and_many(core: Core) -> None:
    """Teaches the core that a single sequence drafts and a hundred do not."""
    lengths = core.speculation.lengths
    for num_sequences, length in ((1, 3), (100, 0), (1, 3)):
        assert lengths.choose(num_sequences) == length
        for _ in range(5):
            lengths.observe(num_sequences, length, 0.01, alone=True, drafted=length > 0)


def returned(core: Core, *rows: list[int], drafts: list[int] | None = None, logprobs: Logprobs | None = None) -> None:
    """Applies the oldest step in flight with these tokens, a list for each slot that may have sampled."""
    flat = np.array([token for row in rows for token in row], dtype=np.int32)
    counts = u32([len(row) for row in rows])
    verified = None if drafts is None else u32(drafts)
    core.apply(StepResult(core.steps_in_flight[0].step_id, flat, counts, verified, logprobs=logprobs), now=0)


def began(core: Core, **fields: object) -> None:
    """Returns a core with one sequence of 10 tokens that has its first output token."""
    add(core, 10, **fields)
    core.schedule(0)
    returned(core, [7])
    core.take_events()


@pytest.mark.parametrize(
    ("drafts", "outputs", "counts"),
    [
        ([3], [4], (1, 3, 3, [1, 1, 1])),
        ([3], [2], (1, 3, 1, [1, 0, 0])),
        ([2, 1], [3, 2], (2, 3, 3, [2, 1])),
        ([1], [2], (1, 1, 1, [1])),
        ([0], [1], (0, 0, 0, [])),
        ([3, 3], [3, 2], (2, 6, 3, [2, 1, 0])),
    ],
)
def test_s9_drafts_are_counted(
    core: NewCore, drafts: list[int], outputs: list[int], counts: tuple[int, int, int, list[int]]
) -> None:
    c = core(num_speculative_tokens=3)
    add(c, *[10] * len(drafts))
    c.schedule(0)
    returned(c, *[[1]] * len(drafts))
    c.schedule(0)
    returned(c, *[list(range(2, 2 + count)) for count in outputs], drafts=drafts)
    found = c.speculation.counts
    by_position = found.accepted_by_position.tolist()
    assert (found.drafts, found.draft_tokens, found.accepted_tokens, by_position) == counts


def test_s10_no_drafts_within_a_prompt(core: NewCore) -> None:
    c = core(max_num_batched_tokens=50, num_speculative_tokens=3)
    add(c, 80)
    planned = []
    for tokens in ([], [[5]], [[6, 7]]):
        plan = c.schedule(0)
        assert plan is not None
        planned.append(plan.num_tokens)
        returned(c, *tokens)
    assert planned == [50, 30, 4]


def test_s11_a_prompt_that_is_cached_whole_drafts_at_once(core: NewCore) -> None:
    c = core(num_speculative_tokens=3, enable_prefix_caching=True)
    for key in range(2):
        c.add(make_sequence(key, list(range(33)), max_tokens=1, block_size=16))
        plan = c.schedule(0)
        assert plan is not None
        returned(c, [1])
    assert plan.num_tokens == 4  # the last token, and three drafts


def test_a_plan_names_the_draft_length_when_it_changes(core: NewCore) -> None:
    c = core(num_speculative_tokens=3)
    began(c)
    plan = c.schedule(0)
    assert plan is not None
    assert (plan.num_draft_tokens, plan.new_block_slots) == (None, [])  # named in the step before
    plain = core()
    began(plain)
    plan = plain.schedule(0)
    assert plan is not None
    assert (plan.num_draft_tokens, plan.new_block_slots) == (None, None)


def test_two_steps_in_flight_reserve_for_accepted_drafts(core: NewCore) -> None:
    c = core(num_speculative_tokens=5, max_steps_in_flight=2, block_size=4)
    add(c, 10, max_tokens=100)
    c.schedule(0)
    c.schedule(0)
    returned(c, [1])
    c.schedule(0)  # after 11 tokens: 6 more in each of two steps
    assert len(c.kv.table(0)) == 6  # 10 + 2 * 6 positions
    assert (c.running.num_computed[0], c.running.num_drafts_in_flight[0]) == (22, 10)
    returned(c, [2], drafts=[5])
    assert (c.running.num_computed[0], c.running.num_drafts_in_flight[0]) == (17, 5)
    plan = c.schedule(0)
    assert plan is not None
    assert plan.new_block_ids == []  # what was not used is there for the next step


@pytest.mark.parametrize(
    ("fields", "tokens", "got", "reason", "stop"),
    [
        ({"eos_token_ids": (EOS,)}, [3, EOS, 4, 5], [3, EOS], Reason.STOP, None),
        ({"stop_token_ids": (42, 43)}, [10, 42, 12, 43], [10, 42], Reason.STOP, 42),
        ({"max_tokens": 3}, [10, 11, 12, 13], [10, 11], Reason.LENGTH, None),
        ({"max_tokens": 3, "stop_token_ids": (11,)}, [10, 11, 12, 13], [10, 11], Reason.STOP, 11),
        ({"repetition": RepetitionRule(1, 2, 3)}, [9, 9, 9, 4], [9, 9, 9], Reason.REPETITION, None),
        ({"repetition": RepetitionRule(1, 2, 3), "stop_token_ids": (9,)}, [9, 9, 9, 4], [9], Reason.STOP, 9),
    ],
)
def test_tokens_after_the_end_are_dropped(
    core: NewCore, fields: dict[str, object], tokens: list[int], got: list[int], reason: Reason, stop: int | None
) -> None:
    c = core(num_speculative_tokens=3)
    began(c, **fields)
    c.schedule(0)
    returned(c, tokens, drafts=[3])
    events = c.take_events()
    assert [columns.token_ids.tolist() for columns in events.tokens] == [got]
    assert [(end.reason, end.stop_token_id) for end in events.finished] == [(reason, stop)]
    assert c.counts.generated_tokens == 1 + len(got)
    assert c.use.used == 0


def test_log_probabilities_of_dropped_tokens_are_dropped(core: NewCore) -> None:
    c = core(num_speculative_tokens=3)
    add(c, 10)
    add(c, 10, first=1, asks_logprobs=True, stop_token_ids=(42,))
    c.schedule(0)
    one = Logprobs(u32([1]), np.array([7], dtype=np.int32), np.array([-1], dtype=np.float32), u32([1]))
    returned(c, [7], [7], logprobs=one)
    c.take_events()
    c.schedule(0)
    values = np.arange(6, dtype=np.float32)
    entries = Logprobs(u32([2, 2, 2]), np.arange(6, dtype=np.int32), values, u32([1, 2, 3]))
    returned(c, [1, 2], [41, 42, 43], drafts=[1, 2], logprobs=entries)
    (columns,) = c.take_events().tokens
    assert columns.token_counts is not None
    assert (columns.token_ids.tolist(), columns.token_counts.tolist()) == ([1, 2, 41, 42], [2, 2])
    assert columns.logprobs is not None
    assert columns.logprobs.sequence_ids.tolist() == [1, 1]
    assert columns.logprobs.entries.token_ids.tolist() == [0, 1, 2, 3]
    assert columns.logprobs.entries.ranks.tolist() == [1, 2]


def test_sequences_certain_to_end_are_not_scheduled(core: NewCore) -> None:
    c = core(num_speculative_tokens=3, max_steps_in_flight=2)
    add(c, 10, max_tokens=2)
    c.schedule(0)
    c.schedule(0)
    returned(c, [1])
    assert c.schedule(0) is None  # its second token is in flight
    returned(c, [2], drafts=[0])
    assert [end.reason for end in c.take_events().finished] == [Reason.LENGTH]


def test_drafts_are_limited_by_the_token_budget(core: NewCore) -> None:
    c = core(num_speculative_tokens=7, max_num_batched_tokens=16)
    add(c, *[2] * 5)
    c.schedule(0)
    returned(c, *[[1]] * 5)
    plan = c.schedule(0)
    assert plan is not None
    assert (plan.num_draft_tokens, plan.num_tokens) == (2, 15)


def test_no_second_step_is_planned_while_a_trial_awaits_its_result(core: NewCore) -> None:
    """Steps take 1 ms, 100 ms with drafts: there are two of the latter."""
    c = core(num_speculative_tokens=3, max_steps_in_flight=3, max_num_seqs=64, num_blocks=100_000)
    add(c, *[10] * 64, max_tokens=4000)
    now, orders = 0.0, []
    for _ in range(200):
        while (plan := c.schedule(now)) is not None:
            orders.append(plan.num_tokens)
        flight = c.steps_in_flight[0]
        drafted = flight.drafts is not None
        now += 0.1 if drafted else 0.001
        rows = len(flight.slots)
        counts = u32([1] * rows)
        verified = u32([1] * rows) if drafted else None
        c.apply(StepResult(flight.step_id, np.full(rows, 7, np.int32), counts, verified), now=now)
    with_drafts = [i for i, tokens in enumerate(orders) if tokens == 128]
    assert len(with_drafts) % 2 == 0
    assert len(with_drafts) >= 2
    assert all(b == a + 1 for a, b in zip(with_drafts[::2], with_drafts[1::2], strict=True))


@pytest.mark.parametrize(("newcomers", "is_known", "drafts"), [(2, True, 3), (100, False, 3), (100, True, 0)])
def test_the_draft_length_considers_new_sequences(core: NewCore, newcomers: int, is_known: bool, drafts: int) -> None:
    c = core(num_speculative_tokens=3, max_num_seqs=128)
    if is_known:
        knows_few_and_many(c)
    began(c)
    add(c, *[10] * newcomers, first=1)
    plan = c.schedule(0)
    assert plan is not None
    assert plan.num_tokens == 1 + drafts + newcomers * 10


def test_sequences_that_do_not_fit_do_not_shorten_drafts(core: NewCore) -> None:
    c = core(num_speculative_tokens=3, num_blocks=8, max_num_seqs=128)
    knows_few_and_many(c)
    began(c)
    tokens = []
    for newcomers in (0, 100, 0):
        add(c, *[100] * newcomers, first=1)
        plan = c.schedule(0)
        assert plan is not None
        tokens.append(plan.num_tokens)
        returned(c, [1], drafts=[0])
    assert tokens == [1 + 3, 1, 1 + 3]


def test_drafts_preempt_no_sequence_when_blocks_run_out(core: NewCore) -> None:
    """Four sequences fit exactly; with room for drafts they would not."""
    c = core(num_speculative_tokens=8, num_blocks=13, block_size=4, max_steps_in_flight=2, max_model_len=64)
    worker = ReferenceWorker(c.limits)
    for key in range(4):
        c.add(make_sequence(key, [key] * 5, 7, block_size=4))
    for _ in range(40):
        plans = []
        while (plan := c.schedule(0)) is not None:
            plans.append(worker.execute(plan))
        for result in plans:
            c.apply(result, 0)
        if not c.has_work:
            break
    assert not c.has_work
    assert c.counts.preemptions == 0
