"""Recurrent models, scheduler and worker together: the text equals transformers' with chunked, cached, preempted and
cancelled prompts."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import SampleGroup
from quire.services.worker.building.build import build_replica
from quire.shared.errors import InvalidArgument
from quire.shared.kv.kv_specs import FULL, State
from quire.shared.settings import WorkerSettings
from tests.kv_groups.models import Make, confirmed
from tests.kv_groups.test_windows import pair, prompt
from tests.services.worker.checkpoints import RECURRENT_FAMILIES, Checkpoint
from tests.spec_decode.pair import Answer, Pair

families = pytest.mark.parametrize("family", RECURRENT_FAMILIES)
SIZES = {"block_size": 8, "max_num_batched_tokens": 20, "num_blocks": 300}


def check(checkpoint: Checkpoint, answers: list[Answer], count: int) -> None:
    """Checks greedy answers of `count` tokens."""
    assert {len(answer.tokens) for answer in answers} == {count}
    assert [answer.tokens for answer in answers] == [confirmed(checkpoint, a.prompt, a.tokens) for a in answers]


def run_disturbed(run: Pair, gone: Answer, *, turns: int, every: int, cancelled_at: int) -> None:
    """Runs to the end, preempting a sequence repeatedly and cancelling `gone`, the one of stream 4."""
    for turn in range(turns):
        run.plan()
        live = np.flatnonzero(run.core.running.live)
        if turn % every == 2 and len(live):
            run.core.preempt(int(live[turn % len(live)]))
        if turn == cancelled_at:
            run.core.cancel(4)
        if run.results:
            run.result()
    run.run()
    assert run.core.counts.preemptions > 3
    assert gone.end is not None
    assert gone.end.reason is Reason.CANCELLED


@families
def test_text_is_that_of_transformers_though_prompts_come_in_chunks(made: Make, family: str) -> None:
    checkpoint = made(family)
    run = pair(checkpoint, **SIZES)
    lengths = enumerate((50, 3, 23, 9, 37))
    answers = [run.ask(prompt(length, seed), max_tokens=24, eos=()) for seed, length in lengths]
    run.run()
    check(checkpoint, answers, 24)
    assert run.core.use.used == 0


@families
def test_conversation_continues_from_the_saved_state(made: Make, family: str) -> None:
    checkpoint = made(family)
    run = pair(checkpoint, **SIZES)
    first = prompt(40, 1)
    said = run.ask(first, max_tokens=12, eos=())
    run.run()
    again = first + said.tokens + prompt(5, 2)
    asked = [again, first[:30] + prompt(8, 3), first, first[:24]]
    answers = [run.ask(tokens, max_tokens=10, eos=()) for tokens in asked]
    run.run()
    check(checkpoint, answers, 10)
    assert run.core.counts.cached_tokens == 48 + 24 + 32 + 16, "the last token of a prompt is not computed twice"


def test_prompts_of_one_step_do_not_share_blocks_being_written(made: Make) -> None:
    checkpoint = made("qwen3-next")
    run = pair(checkpoint, **{**SIZES, "max_num_batched_tokens": 128})
    head = prompt(24, 5)
    asked = [head + prompt(length, length) for length in (3, 7, 1)]
    answers = [run.ask(tokens, max_tokens=10, eos=()) for tokens in asked]
    run.run()
    check(checkpoint, answers, 10)


@pytest.mark.parametrize("family", ["qwen3-next", "falcon-h1"])
def test_preempted_and_cancelled_sequences_leave_no_trace(made: Make, family: str) -> None:
    checkpoint = made(family)
    run = pair(checkpoint, **SIZES)
    answers = [run.ask(prompt(20 + seed, seed), max_tokens=16, eos=()) for seed in range(4)]
    gone = run.ask(prompt(30, 9), max_tokens=16, eos=())
    run_disturbed(run, gone, turns=50, every=5, cancelled_at=20)
    check(checkpoint, answers, 16)
    assert run.core.use.used == 0


def test_samples_of_one_prompt_start_behind_its_last_whole_block(made: Make) -> None:
    checkpoint = made("qwen3-next")
    run, tokens, family = pair(checkpoint, **SIZES), prompt(30, 4), SampleGroup()
    answers = [run.ask(tokens, max_tokens=12, eos=(), family=family) for _ in range(3)]
    run.run()
    assert answers[0].tokens == answers[1].tokens == answers[2].tokens
    check(checkpoint, answers[:1], 12)
    assert run.core.counts.cached_tokens == 2 * 24


def test_a_scheduler_that_restarts_finds_the_states_that_the_worker_holds(made: Make) -> None:
    checkpoint = made("qwen3-next")
    run, first = pair(checkpoint, **SIZES), prompt(60, 1)
    said = run.ask(first, max_tokens=16, eos=())
    run.run()
    later = Pair(run.replica)
    later.adopt(run.replica.end_epoch())
    answer = later.ask(first + said.tokens, max_tokens=10, eos=())
    later.run()
    check(checkpoint, [answer], 10)
    assert later.core.counts.cached_tokens == 72


def test_blocks_are_as_long_as_a_state_takes_and_are_refused_if_shorter(made: Make) -> None:
    folder = str(made("qwen3-next").folder)
    limits = pair(made("qwen3-next"), block_size=0, num_blocks=100).replica.limits
    assert limits.block_size == 16, "what it is without states, which is enough"
    assert [type(group.spec) for group in limits.layout.groups] == [type(FULL), State, State, State]
    with pytest.raises(
        InvalidArgument, match=r"block_size: a block of 4 positions is too small for the state .* at least 8"
    ):
        build_replica(WorkerSettings(model=folder, num_blocks=20, block_size=4, dtype="float32"))


def test_unsupported_options_are_rejected_by_name(made: Make) -> None:
    folder = str(made("qwen3-next").folder)
    settings = WorkerSettings(model=folder, num_blocks=40, dtype="float32", threads=1, context_parallel_size=2)
    with pytest.raises(
        InvalidArgument, match="context_parallel_size: 2: recurrent layers pass a state from token to token"
    ):
        build_replica(settings)
