"""Prefixes are found to the token, although blocks are coarse: the beginning of a block is copied or extended."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepPlan
from quire.services.scheduler.core.sequences.sequence import Sequence
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.scheduler.reference_worker import ReferenceWorker, oracle

SIZE, GRAIN = 64, 16
PROMPT = [token % 37 for token in range(100)]  # a block, and 36 tokens of the next


class Run:
    """A core with coarse blocks and its worker, one step at a time."""

    def __init__(self, **fields: object) -> None:
        defaults: dict[str, object] = {"block_size": SIZE, "enable_prefix_caching": True, "num_blocks": 100}
        self.core = Core(make_limits(**(defaults | fields)))
        self.worker = ReferenceWorker(self.core.limits)
        self.tokens: dict[int, list[int]] = {}
        self._keys = iter(range(10_000))

    def add(self, prompt: list[int], max_tokens: int = 4, **fields: object) -> Sequence:
        sequence = make_sequence(next(self._keys), prompt, max_tokens, self.core.limits.block_size, **fields)
        self.core.add(sequence)
        return sequence

    def step(self) -> StepPlan:
        plan = self.core.schedule(0)
        assert plan is not None
        self.core.apply(self.worker.execute(plan), 0)
        for columns in self.core.take_events().tokens:
            for stream, token in zip(columns.sequence_ids.tolist(), columns.token_ids.tolist(), strict=True):
                self.tokens.setdefault(stream, []).append(token)
        return plan

    def drain(self) -> None:
        while self.core.has_work:
            self.step()

    def say(self, prompt: list[int], max_tokens: int = 4, **fields: object) -> tuple[int, int]:
        """Runs one sequence alone and checks its text; returns the cached and the computed tokens."""
        before = self.worker.num_computed_tokens
        sequence = self.add(prompt, max_tokens, **fields)
        self.drain()
        assert self.tokens[sequence.key] == oracle(prompt, len(prompt) + max_tokens, eos=False)
        assert self.core.use.used == 0
        return sequence.num_cached_tokens, self.worker.num_computed_tokens - before


def test_a_prompt_that_was_computed_before_costs_one_token() -> None:
    run = Run()
    assert run.say(PROMPT) == (0, 103)
    assert run.say(PROMPT) == (100, 4)
    assert run.core.counts.cached_tokens == 99, "the last token is computed again, and not counted as read"


@pytest.mark.parametrize("grain", [0, 64, 100])
def test_without_a_grain_below_the_block_only_whole_blocks_are_found(grain: int) -> None:
    run = Run(prefix_grain=grain)
    run.say(PROMPT)
    assert run.say(PROMPT) == (64, 39)
    assert run.core.kv.parts is None


def test_an_unowned_partial_block_is_extended_without_a_copy() -> None:
    run = Run()
    run.say(PROMPT)
    chat = [*PROMPT, *run.tokens[0], 1, 2, 3]
    run.add(chat)
    plan = run.step()
    (admission,) = plan.admitted
    assert (admission.num_cached_tokens, plan.copies) == (103, []), "the last token of an answer is never computed"
    assert plan.num_tokens == len(chat) - 103
    run.drain()


def test_a_shared_partial_block_is_copied() -> None:
    run = Run()
    run.say(PROMPT)
    first, second = run.add([*PROMPT, 1, 2]), run.add([*PROMPT, 3, 4])
    plan = run.step()
    tables = [run.core.kv.table(slot) for slot in (0, 1)]
    assert tables[0][0] == tables[1][0]
    assert plan.copies == [(2, tables[0][1]), (2, tables[1][1])], "neither continues all that is in it"
    assert plan.num_tokens == 2 * 2
    run.drain()
    for sequence in (first, second):
        prompt = [*PROMPT, *([1, 2] if sequence is first else [3, 4])]
        assert run.tokens[sequence.key] == oracle(prompt, len(prompt) + 4, eos=False)


def test_a_partial_block_in_use_is_copied() -> None:
    run = Run()
    run.add(PROMPT, max_tokens=50)
    run.step()
    second = run.add(PROMPT, max_tokens=50)
    plan = run.step()
    assert plan.copies == [(run.core.kv.table(0)[1], run.core.kv.table(1)[1])]
    assert second.num_cached_tokens == 100
    run.drain()
    assert run.tokens[0] == run.tokens[1] == oracle(PROMPT, 150, eos=False)


def test_the_beginning_of_a_full_block_is_copied() -> None:
    run = Run()
    run.say(PROMPT, max_tokens=60)
    assert run.say([*PROMPT[:90], 5, 5, 5]) == (90, 6)
    assert run.say(PROMPT[:90]) == (90, 4)


def test_equal_prompts_of_one_step_share_whole_blocks_only() -> None:
    run = Run()
    for _ in range(3):
        run.add(PROMPT)
    plan = run.step()
    assert plan.copies == [], "what the step itself computes cannot be copied before it"
    assert plan.num_tokens == 100 + 2 * 36
    run.drain()
    assert run.tokens == dict.fromkeys(range(3), oracle(PROMPT, 104, eos=False))


def test_a_copy_source_is_not_allocated_before_the_copy() -> None:
    run = Run(num_blocks=5)
    run.say(PROMPT, max_tokens=20)  # two blocks
    run.add([*PROMPT, 1])  # shares one, copies one
    run.add([7] * 60)
    waits = run.add([8] * 60)  # the only block left is the one that is copied
    plan = run.step()
    assert plan.copies == [(2, run.core.kv.table(0)[1])]
    assert len(plan.admitted) == 2
    run.drain()
    assert run.tokens[waits.key] == oracle([8] * 60, 64, eos=False)


def test_no_copy_is_made_when_all_blocks_are_needed() -> None:
    run = Run(num_blocks=3)
    run.say(PROMPT, max_tokens=20)
    assert run.say([*PROMPT[:90], 1, 2]) == (64, 31)


def test_a_preempted_sequence_resumes_within_its_block() -> None:
    run = Run()
    sequence = run.add(PROMPT, max_tokens=20)
    for _ in range(5):
        run.step()
    run.core.preempt(sequence.slot)
    plan = run.step()
    assert (plan.num_tokens, plan.copies) == (1, [])
    assert run.core.counts.resumed_cached_tokens == 104
    run.drain()
    assert run.tokens[0] == oracle(PROMPT, 120, eos=False)


def test_a_half_computed_prompt_is_cached_when_preempted() -> None:
    run = Run(max_num_batched_tokens=90)
    sequence = run.add(PROMPT)
    run.step()
    run.core.preempt(sequence.slot)
    assert run.step().num_tokens == 10
    run.drain()
    assert run.tokens[0] == oracle(PROMPT, 104, eos=False)


def test_partial_blocks_are_separated_by_salt() -> None:
    run = Run()
    run.say(PROMPT[:40], salt="a")
    assert run.say(PROMPT[:40], salt="b")[0] == 0
    assert run.say(PROMPT[:40], salt="a")[0] == 40


def test_prompt_logprobs_and_skipped_caching_read_no_partial_blocks() -> None:
    run = Run()
    run.say(PROMPT)
    assert run.say(PROMPT, prompt_logprobs_from=95)[0] == 94
    assert run.say(PROMPT, prompt_logprobs_from=70)[0] == 64
    assert run.say(PROMPT, prompt_logprobs_from=30)[0] == 29
    assert run.say(PROMPT, skip_reading_prefix_cache=True)[0] == 0


def test_partial_blocks_are_evicted_and_reset_like_others() -> None:
    run = Run(num_blocks=5)
    run.say(PROMPT)
    assert (run.core.use.cached, run.core.use.free) == (2, 2)
    run.say([9] * 150)  # takes the two that hold nothing, and the tail
    assert run.say(PROMPT) == (64, 39)
    assert run.core.reset_prefix_cache() is not None
    assert run.core.use.cached == 0
    assert run.say(PROMPT) == (0, 103)


def test_fewer_tokens_than_the_grain_are_not_recorded() -> None:
    run = Run()
    run.say(PROMPT[:10])
    assert run.core.use.cached == 0


def test_a_worker_reports_whole_blocks_to_a_new_scheduler() -> None:
    run = Run()
    run.say(PROMPT)
    second = Run()
    second.worker.kv = run.worker.kv
    pool = run.core.kv.pool
    for block in range(1, 100):
        block_hash = pool.hash_of(block)
        if block_hash:
            second.core.kv.pool.adopt(block, block_hash)
    assert second.say(PROMPT) == (64, 39)
    assert second.say(PROMPT) == (100, 4)


def test_placement_counts_partial_blocks_as_cached(core: Callable[..., Core]) -> None:
    run = Run()
    run.say(PROMPT)
    assert run.core.num_cached(make_sequence(1, PROMPT, block_size=SIZE)) == 100
    assert core().num_cached(make_sequence(1, PROMPT)) == 0


texts = st.tuples(st.integers(0, 2), st.integers(1, 200), st.lists(st.integers(0, 1), max_size=20))


@settings(max_examples=40, deadline=None)
@example([((0, 32, [0]), 32), ((0, 32, []), 2), ((0, 32, [0]), 32), ((0, 16, []), 1)])  # the third is found no more
@given(st.lists(st.tuples(texts, st.integers(1, 70)), min_size=2, max_size=6))
def test_consecutive_prompts_find_everything_computed(
    asked: list[tuple[tuple[int, int, list[int]], int]],
) -> None:
    """Exact to the token, except for the last few: less than a grain of a block is not searched, and of blocks with the
    same beginning only the latest is searched."""
    run = Run(num_blocks=1000)
    computed: list[list[int]] = []
    for (which, length, ending), max_tokens in asked:
        prompt = [(i * (which + 3)) % 41 for i in range(length)] + ending
        longest = max((_num_common(prompt, text) for text in computed), default=0)
        num_cached, _ = run.say(prompt, max_tokens)
        assert longest // GRAIN * GRAIN <= num_cached <= longest
        computed.append((prompt + oracle(prompt, len(prompt) + max_tokens, eos=False))[:-1])


def _num_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
