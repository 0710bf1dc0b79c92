"""Drafts of recurrent models on CUDA, with and without graphs: pytest -m gpu. The text equals transformers'."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.graphs.decode_graphs import DecodeGraphs
from quire.services.worker.step.step_inputs import StepInputs
from tests.kv_groups.test_cuda import WAYS
from tests.kv_groups.test_recurrent_drafts import (
    DRAFTED,
    THREE,
    check_conversations,
    check_drafts,
    draft_known_answers,
    drafting,
    recurrences,
)
from tests.kv_groups.test_states import check, run_disturbed
from tests.kv_groups.test_windows import pair, prompt
from tests.observing import calls_of
from tests.services.worker import checkpoints
from tests.services.worker.replica_internals import kept_of

pytestmark = pytest.mark.gpu

SIZES = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 64, "num_blocks": 300}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
families = pytest.mark.parametrize("family", DRAFTED)


@ways
@families
@pytest.mark.parametrize("in_flight", [1, 2])
def test_drafts_change_no_text(tmp_path: Path, family: str, way: dict[str, Any], in_flight: int) -> None:
    """Some drafts are rejected, and chunked prompts share their steps."""
    made, prompts = checkpoints.make(family, tmp_path), [prompt(length, length) for length in (90, 5, 33, 1, 18)]
    run = drafting(made, prompts, 40, {**SIZES, **way}, max_steps_in_flight=in_flight)
    answers = [run.ask(tokens, max_tokens=40, eos=()) for tokens in prompts]
    run.run()
    check(made, answers, 40)
    check_drafts(run)


@ways
@families
def test_conversation_continues_from_the_state_of_known_tokens(
    tmp_path: Path, family: str, way: dict[str, Any]
) -> None:
    check_conversations(checkpoints.make(family, tmp_path), range(20, 36, 3), 8, {**SIZES, **way})


@ways
@families
def test_preempted_and_cancelled_sequences_leave_no_trace(tmp_path: Path, family: str, way: dict[str, Any]) -> None:
    made, prompts = checkpoints.make(family, tmp_path), [prompt(20 + seed, seed) for seed in range(4)]
    run = drafting(made, [*prompts, prompt(30, 9)], 32, {**SIZES, **way})
    answers = [run.ask(tokens, max_tokens=32, eos=()) for tokens in prompts]
    gone = run.ask(prompt(30, 9), max_tokens=32, eos=())
    run_disturbed(run, gone, turns=40, every=3, cancelled_at=12)
    check(made, answers, 32)
    check_drafts(run)


@families
def test_steps_without_drafts_use_graphs(tmp_path: Path, family: str) -> None:
    made = checkpoints.make(family, tmp_path)
    run = drafting(made, [prompt(9, 1)], 40, SIZES)
    with calls_of(DecodeGraphs.prepare) as steps:
        known = run.ask(prompt(9, 1), max_tokens=40, eos=())
        run.run()
        num_recorded = len(steps)
        unknown = run.ask(prompt(9, 2), max_tokens=40, eos=())
        run.run()
    seen: list[StepInputs] = [step.arguments["inputs"] for step in steps]
    check(made, [known, unknown], 40)
    check_drafts(run)
    assert num_recorded < 20, "few follow a step whose drafts were all wrong, and have none"
    assert len(seen) - num_recorded >= 36, "all but those that begin a block: they bring one for each KV group"
    assert all(inputs.lags is None and inputs.drafts is None for inputs in seen)


def test_draft_states_are_measured_with_the_largest_steps(tmp_path: Path) -> None:
    """Its memory is allocated before blocks are counted, so that the first drafts allocate none."""
    made, question = checkpoints.make("falcon-h1", tmp_path), prompt(9, 1)
    plain = pair(made, **SIZES)
    answer = plain.ask(question, max_tokens=40, eos=())
    plain.run()
    with recurrences() as layers:
        run = pair(made, THREE, **{**SIZES, "num_blocks": 0, "gpu_memory_utilization": 0.3})
    draft_known_answers(run, [answer])
    taken = kept_of(layers)
    assert layers
    assert {len(part) for part in taken} == {(run.replica.limits.max_num_seqs + 1) * 3}
    answer = run.ask(question, max_tokens=40, eos=())
    run.run()
    check(made, [answer], 40)
    check_drafts(run)
    assert all(a is b for a, b in zip(taken, kept_of(layers), strict=True))
