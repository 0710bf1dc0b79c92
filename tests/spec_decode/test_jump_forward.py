"""Jump-forward: forced tokens of a grammar cost no steps of their own, and the text is unchanged."""

from __future__ import annotations

import json

import pytest

from quire.services.worker.replica.replica import Replica
from tests.spec_decode.pair import Answer, Pair, build
from tests.spec_decode.questions import questions

FORM = {
    "type": "object",
    "properties": {
        "the_name_of_the_customer": {"type": "string", "maxLength": 12},
        "the_number_of_the_order": {"type": "integer", "minimum": 0, "maximum": 999},
        "is_the_invoice_paid": {"type": "boolean"},
    },
    "required": ["the_name_of_the_customer", "the_number_of_the_order", "is_the_invoice_paid"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def plain() -> Replica:
    return build()


@pytest.fixture(scope="module")
def jumping() -> Replica:
    return build({"method": "grammar", "num_speculative_tokens": 16})


def ask(replica: Replica, constrained: bool = True, free: bool = False) -> tuple[Pair, list[Answer]]:
    pair = Pair(replica)
    form = {"structured_output": {"json_schema": json.dumps(FORM), "disable_any_whitespace": True}}
    for number, prompt in enumerate(questions()[:6]):
        if constrained:
            pair.ask(prompt, max_tokens=120, temperature=1.0, seed=number, logprobs=2, **form)
        if free:
            pair.ask(prompt, max_tokens=24, temperature=0.7, seed=number)
    pair.run()
    return pair, pair.answers


def test_forced_tokens_take_no_steps_and_change_nothing(plain: Replica, jumping: Replica) -> None:
    slow, slow_answers = ask(plain, free=True)
    fast, fast_answers = ask(jumping, free=True)
    for one, other in zip(slow_answers, fast_answers, strict=True):
        assert other.tokens == one.tokens
        assert other.end is not None
        assert one.end is not None
        assert other.end.reason is one.end.reason
        assert [entries[0] for entries in other.logprobs] == [entries[0] for entries in one.logprobs]
    counts = fast.core.speculation.counts
    assert counts.accepted_tokens == counts.draft_tokens > 0, "forced tokens are always accepted"
    assert fast.num_steps < 0.6 * slow.num_steps


def test_no_drafts_without_constrained_sequences(plain: Replica, jumping: Replica) -> None:
    slow, _ = ask(plain, constrained=False, free=True)
    fast, _ = ask(jumping, constrained=False, free=True)
    assert fast.num_steps == slow.num_steps
    assert fast.core.speculation.counts.drafts == 0
    assert fast.core.running.num_constrained == 0
    assert not fast.core.drafts_wanted


def test_forced_tokens_take_precedence_over_other_drafts(plain: Replica) -> None:
    replica = build({"method": "ngram", "num_speculative_tokens": 6, "prompt_lookup_min": 1})
    _, slow_answers = ask(plain, free=True)
    fast, fast_answers = ask(replica, free=True)
    assert [answer.tokens for answer in fast_answers] == [answer.tokens for answer in slow_answers]
    assert fast.core.speculation.counts.accepted_tokens > 40
