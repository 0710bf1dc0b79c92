"""Samples of one prompt: the prompt is computed once, and no other sequence waits for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepPlan, StepResult
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence
from tests.services.scheduler.conftest import count_operations, make_sequence
from tests.services.scheduler.core.steps import tokens_of
from tests.services.scheduler.reference_worker import ReferenceWorker, oracle

NewCore = Callable[..., Core]
PROMPT = list(range(40))  # 2 blocks of 16, and half of one


class Run:
    """A core and its worker, one step at a time."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.worker = ReferenceWorker(core.limits)
        self.tokens: dict[int, list[int]] = {}
        self.ended: dict[int, Reason] = {}

    def add(self, count: int, prompt: list[int] = PROMPT, first: int = 0, **fields: object) -> list[Sequence]:
        sample_group = SampleGroup()
        made = [make_sequence(key, prompt, sample_group=sample_group, **fields) for key in range(first, first + count)]
        for sequence in made:
            self.core.add(sequence)
        return made

    def plan(self) -> StepPlan:
        plan = self.core.schedule(0)
        assert plan is not None
        return plan

    def finish(self, plan: StepPlan) -> StepResult:
        result = self.worker.execute(plan)
        self.core.apply(result, 0)
        events = self.core.take_events()
        for columns in events.tokens:
            for stream, token in zip(columns.sequence_ids.tolist(), columns.token_ids.tolist(), strict=True):
                self.tokens.setdefault(stream, []).append(token)
        self.ended |= {finished.sequence.key: finished.reason for finished in events.finished}
        return result

    def step(self) -> dict[int, int]:
        plan = self.plan()
        counts = tokens_of(self.core, plan)
        self.finish(plan)
        return counts

    def drain(self) -> None:
        while self.core.has_work:
            self.step()


@pytest.mark.parametrize("caching", [True, False])
def test_one_computes_the_prompt_and_the_others_only_its_last_token(core: NewCore, caching: bool) -> None:
    run = Run(core(enable_prefix_caching=caching))
    run.add(4)
    assert run.step() == {0: 40}
    plan = run.plan()
    assert tokens_of(run.core, plan) == dict.fromkeys(range(4), 1)
    assert [a.num_cached_tokens for a in plan.admitted] == [40, 40, 40]
    tables = [list(run.core.kv.table(slot)) for slot in range(4)]
    assert all(table[:2] == tables[0][:2] for table in tables)
    assert plan.copies == [(tables[0][2], table[2]) for table in tables[1:]]
    assert run.core.use.used == 2 + 4
    run.finish(plan)
    run.drain()
    expected = oracle(PROMPT, 40 + 16, eos=False)
    assert run.tokens == dict.fromkeys(range(4), expected)
    assert run.worker.num_computed_tokens == 40 + 3 + 4 * 15
    assert run.core.use.used == 0


def test_a_prompt_of_whole_blocks_needs_no_copies(core: NewCore) -> None:
    run = Run(core())
    run.add(3, PROMPT[:32])
    run.step()
    plan = run.plan()
    assert plan.copies == []
    assert run.core.use.used == 2 + 1  # the first one's next token
    run.finish(plan)
    run.drain()
    assert run.tokens == dict.fromkeys(range(3), oracle(PROMPT[:32], 32 + 16, eos=False))


def test_other_sequences_are_admitted_while_a_long_prompt_is_computed(core: NewCore) -> None:
    run = Run(core(max_num_batched_tokens=64, long_prefill_token_threshold=40))
    run.add(3, list(range(100)))
    run.add(1, [7] * 10, first=10)
    assert run.step() == {0: 40, 10: 10}
    assert run.step() == {0: 40, 10: 1}
    assert run.core.num_waiting == 2
    assert run.step() == {0: 20, 10: 1}
    assert run.step() == {0: 1, 1: 1, 2: 1, 10: 1}


def test_siblings_precede_later_arrivals(core: NewCore) -> None:
    run = Run(core(max_num_seqs=2))
    run.add(2)
    run.core.add(make_sequence(9, [5, 6]))
    assert run.step() == {0: 40, 9: 2}  # there was room meanwhile
    run.core.add(make_sequence(10, [5, 6]))
    run.core.cancel(9)
    run.core.take_events()
    assert run.step() == {0: 1, 1: 1}


def test_the_next_sibling_computes_the_prompt_when_the_first_is_cancelled(core: NewCore) -> None:
    run = Run(core(max_num_batched_tokens=30))
    run.add(3)
    assert run.step() == {0: 30}
    run.core.cancel(0)
    assert run.step() == {1: 30}
    assert run.step() == {1: 10}
    assert run.step() == {1: 1, 2: 1}
    run.drain()
    assert run.ended == {0: Reason.CANCELLED, 1: Reason.LENGTH, 2: Reason.LENGTH}


def test_a_sample_without_running_siblings_uses_the_prefix_cache(core: NewCore) -> None:
    run = Run(core(max_num_seqs=1, enable_prefix_caching=True))
    run.add(2, max_tokens=1)
    run.step()
    assert run.ended == {0: Reason.LENGTH}
    assert run.step() == {1: 8}
    assert run.tokens[0] == run.tokens[1]


def test_a_preempted_sibling_resumes_with_its_own_tokens(core: NewCore) -> None:
    run = Run(core(enable_prefix_caching=True))
    run.add(3)
    run.step()
    run.step()
    run.core.preempt(1)
    run.core.preempt(0)
    run.drain()
    assert run.tokens == dict.fromkeys(range(3), oracle(PROMPT, 40 + 16, eos=False))


def test_a_sample_with_prompt_logprobs_computes_the_prompt(core: NewCore) -> None:
    run = Run(core(enable_prefix_caching=True))
    sample_group = SampleGroup()
    for key in range(3):
        run.core.add(make_sequence(key, PROMPT, sample_group=sample_group, prompt_logprobs_from=1 if key == 0 else 0))
    assert run.step() == {0: 40}
    assert run.step() == dict.fromkeys(range(3), 1)


def test_blocked_siblings_are_evacuated_and_cancelled(core: NewCore) -> None:
    run = Run(core(max_num_batched_tokens=30))
    run.add(4)
    run.step()
    run.core.cancel(2)
    assert [f.sequence.key for f in run.core.take_events().finished] == [2]
    moved = run.core.evacuate()
    assert [sequence.key for sequence in moved] == [0, 1, 3]
    assert (run.core.num_waiting, run.core.num_waiting_tokens) == (0, 0)
    second = Run(core())
    for sequence in moved:
        second.core.add(sequence)
    assert second.step() == {0: 40}
    assert second.step() == {0: 1, 1: 1, 3: 1}
    second.drain()
    assert all(second.tokens[key] == oracle(PROMPT, 56, eos=False) for key in (0, 1, 3))


def test_deadlines_expire_for_blocked_siblings(core: NewCore) -> None:
    c = core(max_num_batched_tokens=30)
    sample_group = SampleGroup()
    for key in range(2):
        c.add(make_sequence(key, PROMPT, sample_group=sample_group, deadline=5.0 if key else np.inf))
    c.schedule(0)
    c.schedule(6)
    (ended,) = c.take_events().finished
    assert (ended.sequence.key, ended.reason) == (1, Reason.DEADLINE)
    assert c.num_waiting == 0


class Compared(Sequence):
    """Sequence that counts comparisons with it in searches for another one."""

    __slots__ = ()
    times = 0

    def __eq__(self, other: object) -> bool:
        Compared.times += 1
        return self is other

    __hash__ = object.__hash__


def cancel_all(core: NewCore, count: int, *, backwards: bool) -> int:
    """Counts the operations of cancelling `count` samples, one of which is about to compute the prompt."""
    run = Run(core(max_num_batched_tokens=30))
    made = run.add(count)
    run.step()
    for sequence in made:
        sequence.__class__ = Compared
    keys = [sequence.key for sequence in made]
    before = Compared.times
    operations = count_operations(lambda: [run.core.cancel(key) for key in (reversed(keys) if backwards else keys)])
    assert run.core.num_waiting == run.core.num_waiting_tokens == 0
    return operations + Compared.times - before


@pytest.mark.parametrize("backwards", [True, False])
def test_cancelling_a_sample_takes_constant_time(core: NewCore, backwards: bool) -> None:
    assert cancel_all(core, 400, backwards=backwards) < 12 * cancel_all(core, 40, backwards=backwards)
