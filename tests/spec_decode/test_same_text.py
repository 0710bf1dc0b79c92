"""Speculation does not change the text, with every parameter and any number of steps in flight."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from quire.services.worker.replica.replica import Replica
from tests.services.scheduler.conftest import UnlimitedForecast
from tests.spec_decode.methods import METHODS, TREES
from tests.spec_decode.pair import Answer, Pair, build
from tests.spec_decode.questions import questions

ALL = METHODS | TREES
Expected = Callable[..., list[Answer]]
PERSON = json.dumps(
    {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "ages": {"type": "array", "items": {"type": "integer"}},
        },
        "required": ["name", "ages"],
        "additionalProperties": False,
    }
)
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": {"temperature": 0.8, "seed": 3},
    "filtered": {"temperature": 1.3, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalties": {"temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.4},
    "repetition penalty": {"repetition_penalty": 1.3},
    "bad words": {"bad_words": [[33], [28, 33], [262, 264, 28]]},
    "ids": {"allowed_token_ids": list(range(3, 900)), "logit_bias": {40: 2.0, 41: -1.0}, "temperature": 0.5, "seed": 9},
    "json": {"structured_output": {"json_schema": PERSON}, "temperature": 0.9, "seed": 8},
    "regex": {"structured_output": {"regex": "([a-z]+ [0-9]{3}\\n){4}"}, "max_tokens": 50},
    "min tokens": {"min_tokens": 12, "stop_token_ids": [33, 34]},
    "repetition detection": {
        "repetition": RepetitionRule(1, 3, 4),
        "allowed_token_ids": [28, 33, 40],
        "max_tokens": 80,
    },
}


@pytest.fixture(scope="module")
def plain() -> Replica:
    return build()


@pytest.fixture(scope="module")
def expected(plain: Replica) -> Expected:
    return expected_of(plain)


def expected_of(plain: Replica) -> Expected:
    """Returns the function for answers without drafts, which are computed once for each way of asking."""
    known: dict[str, list[Answer]] = {}

    def get(**asked: Any) -> list[Answer]:
        way = repr(sorted(asked.items()))
        if way not in known:
            pair = Pair(plain)
            known[way] = ask_all(pair, **asked)
            pair.run()
        return known[way]

    return get


@pytest.fixture(scope="module", params=ALL)
def drafting(request: pytest.FixtureRequest) -> Replica:
    return build(ALL[request.param])


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def ask_all(pair: Pair, max_tokens: int = 28, per_skill: int = 1, **sampling: Any) -> list[Answer]:
    return [pair.ask(prompt, max_tokens, **sampling) for prompt in questions(per_skill)]


def texts(answers: list[Answer]) -> list[list[int]]:
    return [answer.tokens for answer in answers]


def reasons(answers: list[Answer]) -> list[tuple[Reason, int | None]]:
    return [(a.end.reason, a.end.stop_token_id) for a in answers if a.end is not None]


@pytest.mark.parametrize("sampling", SAMPLING)
def test_the_same_text_with_every_parameter(expected: Expected, drafting: Replica, sampling: str) -> None:
    with_drafts = Pair(drafting)
    answers = ask_all(with_drafts, **SAMPLING[sampling])
    with_drafts.run()
    assert texts(answers) == texts(expected(**SAMPLING[sampling]))
    assert reasons(answers) == reasons(expected(**SAMPLING[sampling]))
    assert with_drafts.core.speculation.counts.accepted_tokens > 3
    assert with_drafts.core.use.used == 0


@pytest.mark.parametrize("in_flight", [1, 3])
def test_the_same_text_however_many_steps_overlap(expected: Expected, drafting: Replica, in_flight: int) -> None:
    pair = Pair(drafting, max_steps_in_flight=in_flight)
    answers = ask_all(pair, temperature=0.6, seed=11)
    pair.run()
    assert texts(answers) == texts(expected(temperature=0.6, seed=11))


@pytest.mark.parametrize("method", ALL)
def test_the_same_text_with_changing_draft_lengths(expected: Expected, method: str) -> None:
    pair = Pair(build(ALL[method] | {"adaptive_length": True}), max_steps_in_flight=3)
    draw = random.Random(1)
    pair.core.speculation.lengths.choose = lambda *numbers: draw.choice([0, 0, 1, 4])  # type: ignore[method-assign]
    answers = ask_all(pair, temperature=0.6, seed=11)
    pair.run()
    assert texts(answers) == texts(expected(temperature=0.6, seed=11))
    assert pair.core.speculation.counts.accepted_tokens > 3


def test_log_probabilities_are_those_of_single_steps(plain: Replica, drafting: Replica) -> None:
    pairs = [Pair(drafting), Pair(plain)]
    answers = [
        [pair.ask(p, 30, logprobs=i % 3, temperature=0.3 * i, seed=i) for i, p in enumerate(questions())]
        for pair in pairs
    ]
    for pair in pairs:
        pair.run()
    for ours, theirs in zip(*answers, strict=True):
        assert len(ours.logprobs) == len(ours.tokens) == len(theirs.tokens)
        for (ids, values, rank), (their_ids, their_values, their_rank) in zip(
            ours.logprobs, theirs.logprobs, strict=True
        ):
            assert ids == their_ids
            assert rank == their_rank
            assert values == pytest.approx(their_values, abs=2e-3)


def check_preempted(expected: Expected, drafting: Replica) -> None:
    """Checks that sequences that lose their blocks generate the same as with enough blocks."""
    tight = Pair(drafting, num_blocks=84)
    tight.core.state.forecast = UnlimitedForecast()  # admits more sequences than fit
    asked = {"per_skill": 2, "max_tokens": 60, "temperature": 0.5, "seed": 2, "eos": ()}
    answers = ask_all(tight, **asked)
    tight.run()
    assert tight.core.counts.preemptions > 0
    assert texts(answers) == texts(expected(**asked))
    assert tight.core.use.used == 0


def test_preempted_sequences_generate_the_same(expected: Expected, drafting: Replica) -> None:
    check_preempted(expected, drafting)


def test_a_sequence_migrates_to_a_worker_without_drafts_and_back(
    plain: Replica, expected: Expected, drafting: Replica
) -> None:
    first = Pair(drafting)
    answers = ask_all(first, temperature=0.6, seed=11)
    for number, replica in enumerate((plain, drafting)):
        for _ in range(12 + number):
            if first.plan():
                first.result()
        moved = first.core.evacuate()
        first = Pair(replica).with_answers(answers, moved)
    first.run()
    assert texts(answers) == texts(expected(temperature=0.6, seed=11))


def test_a_fully_cached_prompt_has_drafts_at_once(drafting: Replica) -> None:
    pair = Pair(drafting)
    prompt = (questions()[0] * 4)[:161]
    first = pair.ask(prompt, 20)
    pair.run()
    again = pair.ask(prompt, 20)
    pair.run()
    assert again.tokens == first.tokens


def test_the_rejection_rule_keeps_greedy_text_and_reproduces_seeded_text(plain: Replica) -> None:
    replica = build(METHODS["ngram"] | {"rejection_sample_method": "standard"})
    hot = {"temperature": 0.9, "top_p": 0.95, "presence_penalty": 0.3, "seed": 6}
    answers = []
    for owner, sampling in ((plain, {}), (replica, {}), (replica, hot), (replica, hot)):
        pair = Pair(owner)
        answers.append(ask_all(pair, **sampling))
        pair.run()
    assert texts(answers[0]) == texts(answers[1])
    assert texts(answers[2]) == texts(answers[3])
    assert pair.core.speculation.counts.accepted_tokens > 20


def test_samples_of_one_prompt_keep_their_seeds(plain: Replica, drafting: Replica) -> None:
    pairs = [Pair(drafting), Pair(plain)]
    answers = [[pair.ask(questions()[-1], 40, temperature=1.0, seed=7 + i) for i in range(5)] for pair in pairs]
    for pair in pairs:
        pair.run()
    assert texts(answers[0]) == texts(answers[1])
    assert len({tuple(tokens) for tokens in texts(answers[0])}) > 1
