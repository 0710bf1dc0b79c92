"""Drafts of recurrent models: the text equals transformers' although some are rejected, and saved states are those
after the known tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from quire.services.worker.building.build import build_replica
from quire.services.worker.layers.recurrent.recurrence import Recurrence
from quire.services.worker.spec_decode.proposer import DraftRequest, HostProposer
from quire.services.worker.step.drafts.drafts import Drafts
from quire.shared.columns import I32
from quire.shared.errors import InvalidArgument
from quire.shared.settings import WorkerSettings
from tests.kv_groups.models import Make
from tests.kv_groups.test_states import SIZES, check, run_disturbed
from tests.kv_groups.test_windows import pair, prompt
from tests.observing import calls_of
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.replica_internals import propose
from tests.spec_decode.pair import Answer, Pair

THREE = {"method": "ngram", "num_speculative_tokens": 3, "adaptive_length": False}
DRAFTED = ("qwen3-next", "granite-hybrid", "falcon-h1")
families = pytest.mark.parametrize("family", DRAFTED)


class Knowing(HostProposer):
    """Proposer that knows the answers, with a wrong draft at every fifth position."""

    def __init__(self, texts: list[list[int]], block_size: int) -> None:
        self._texts, self._block_size = [np.array(text, dtype=np.int32) for text in texts], block_size

    def propose(self, wanted: DraftRequest) -> Drafts | None:
        return self.search(wanted, self._find)

    def _find(self, tokens: I32, most: int) -> I32:
        begin, end = len(tokens), len(tokens) + most
        assert (begin - 1) // self._block_size == end // self._block_size, "the last token of a block is sure"
        known = next((text for text in self._texts if np.array_equal(text[:begin], tokens)), tokens)
        drafts = known[begin:end].copy()
        wrong = np.arange(begin, begin + len(drafts)) % 5 == 0
        drafts[wrong] = (drafts[wrong] + 1) % VOCAB_SIZE
        return drafts


def drafting(
    checkpoint: Checkpoint,
    prompts: list[list[int]],
    max_tokens: int,
    sizes: Mapping[str, Any] = SIZES,
    **core: Any,
) -> Pair:
    """Creates a worker with mostly right drafts for the answers to these prompts."""
    plain = pair(checkpoint, **sizes)
    answers = [plain.ask(tokens, max_tokens=max_tokens, eos=()) for tokens in prompts]
    plain.run()
    run = pair(checkpoint, THREE, core, **sizes)
    draft_known_answers(run, answers)
    return run


def draft_known_answers(run: Pair, answers: list[Answer]) -> None:
    """Gives the worker mostly right drafts for these answers from now on."""
    texts = [answer.prompt + answer.tokens for answer in answers]
    propose(run.replica, Knowing(texts, run.replica.limits.block_size))


def check_drafts(run: Pair) -> None:
    counts = run.core.speculation.counts
    assert counts.accepted_tokens > counts.draft_tokens / 3 > 10
    assert counts.accepted_tokens < counts.draft_tokens
    assert run.core.use.used == 0


def check_conversations(
    checkpoint: Checkpoint, lengths: range, num_more: int, sizes: Mapping[str, Any] = SIZES
) -> None:
    """Checks conversations after answers of these lengths, which end anywhere in a block, with and without drafts."""
    block_size = sizes["block_size"]
    run = drafting(checkpoint, [prompt(21, length) for length in lengths], lengths[-1] + 1, sizes)
    for length in lengths:
        first = prompt(21, length)
        said = run.ask(first, max_tokens=length, eos=())
        run.run()
        again = run.ask(first + said.tokens + prompt(2, length), max_tokens=num_more, eos=())
        before = run.core.counts.cached_tokens
        run.run()
        check(checkpoint, [said], length)
        check(checkpoint, [again], num_more)
        most = (len(first) + length - 1) // block_size * block_size
        assert run.core.counts.cached_tokens - before >= most - block_size, (
            "all blocks but one that was surely full too late"
        )
    check_drafts(run)


@contextmanager
def recurrences() -> Iterator[list[Recurrence]]:
    """Collects the recurrences of layers that are created in the block."""
    found: list[Recurrence] = []
    with calls_of(Recurrence.__init__, on_call=lambda call: found.append(call.arguments["self"])):
        yield found


@families
@pytest.mark.parametrize("in_flight", [1, 2])
def test_text_is_that_of_transformers(made: Make, family: str, in_flight: int) -> None:
    checkpoint = made(family)
    prompts = [prompt(length, seed) for seed, length in enumerate((50, 3, 23, 9, 37))]
    run = drafting(checkpoint, prompts, 24, max_steps_in_flight=in_flight)
    answers = [run.ask(tokens, max_tokens=24, eos=()) for tokens in prompts]
    run.run()
    check(checkpoint, answers, 24)
    check_drafts(run)


@families
def test_conversation_continues_from_the_state_of_known_tokens(made: Make, family: str) -> None:
    check_conversations(made(family), range(12, 20), 2)


@families
def test_preempted_and_cancelled_sequences_leave_no_trace(made: Make, family: str) -> None:
    checkpoint = made(family)
    prompts = [prompt(20 + seed, seed) for seed in range(4)]
    run = drafting(checkpoint, [*prompts, prompt(30, 9)], 24)
    answers = [run.ask(tokens, max_tokens=24, eos=()) for tokens in prompts]
    gone = run.ask(prompt(30, 9), max_tokens=24, eos=())
    run_disturbed(run, gone, turns=40, every=5, cancelled_at=12)
    check(checkpoint, answers, 24)
    check_drafts(run)


def test_sampled_text_is_that_without_drafts(made: Make) -> None:
    """Covers penalties, log-probabilities and seeds of sequences that stop drafting and resume."""
    checkpoint, sampling = made("falcon-h1"), {"temperature": 0.9, "seed": 3, "logprobs": 2, "frequency_penalty": 0.3}
    plain = pair(checkpoint, **SIZES)
    expected = [plain.ask(prompt(9, seed), max_tokens=30, eos=(), **sampling) for seed in range(3)]
    plain.run()
    run = pair(checkpoint, {**THREE, "adaptive_length": True}, **SIZES)
    propose(run.replica, Knowing([answer.prompt + answer.tokens for answer in expected], SIZES["block_size"]))
    answers = [run.ask(prompt(9, seed), max_tokens=30, eos=(), **sampling) for seed in range(3)]
    run.run()
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]
    for answer, without in zip(answers, expected, strict=True):
        assert [ids for ids, _, _ in answer.logprobs] == [ids for ids, _, _ in without.logprobs]
    assert run.core.speculation.counts.accepted_tokens > 5


def test_drafters_with_kv_of_their_own_are_refused(made: Make) -> None:
    folder = str(made("qwen3-next").folder)
    drafts = f'{{"method": "draft_model", "num_speculative_tokens": 3, "model": "{folder}"}}'
    with pytest.raises(
        InvalidArgument, match=r"speculative_config: this method needs the KV of every token, and some of this"
    ):
        build_replica(WorkerSettings(model=folder, num_blocks=40, dtype="float32", speculative_config=drafts))
