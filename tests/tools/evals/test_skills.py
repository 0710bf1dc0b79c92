"""The skills that quire-tiny is trained on: deterministic items, a split that holds, checkers that judge."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import blake2b
from itertools import islice
from random import Random

import pytest

from tools.evals import SKILLS, Item, Split, check, held_back_items, items, load
from tools.evals import vocabulary as v
from tools.evals.documents import sample_document
from tools.evals.item import split_of

EVERY_SIZE = [(name, size) for name in SKILLS for size in load(name).sizes]


def some(name: str, size: str, count: int, split: Split = Split.HELD_BACK) -> list[Item]:
    return list(islice(items(name, split, size, group=4), count))


def right_answer(item: Item) -> str:
    """The expected answer, cut off where `max_tokens` would cut an endless one."""
    return item.expected if item.ends else item.expected[: item.max_tokens]


@pytest.mark.parametrize(("name", "size"), EVERY_SIZE)
def test_items_are_the_same_each_time(name: str, size: str) -> None:
    assert some(name, size, 8) == some(name, size, 8)


def test_items_are_the_same_on_every_machine() -> None:
    # Scores are compared between versions and machines: a new digest is a new evaluation set, to be scored anew.
    digest = blake2b(repr(held_back_items(8)).encode(), digest_size=8).hexdigest()
    assert digest == "12bfd99171946bd2"


@pytest.mark.parametrize(("name", "size"), EVERY_SIZE)
def test_keys_lie_on_their_side_of_the_split(name: str, size: str) -> None:
    for split in Split:
        assert all(split_of(item.key) is split for item in some(name, size, 40, split))


def test_no_held_back_prompt_is_ever_a_training_prompt() -> None:
    held_back = {str(item.messages) for item in held_back_items(20)}
    for name, size in EVERY_SIZE:
        assert held_back.isdisjoint(str(item.messages) for item in some(name, size, 100, Split.TRAIN))


def test_a_held_back_sum_is_not_trained_with_its_summands_swapped() -> None:
    held_back = {item.key for item in some("arithmetic", "sum-2", 300)}
    for item in some("arithmetic", "sum-2", 2000, Split.TRAIN):
        a, b = sorted(map(int, item.key.split(" + ")))
        assert f"{a} + {b}" not in held_back


def test_training_documents_state_no_held_back_fact() -> None:
    for seed in range(50):
        document = sample_document(Random(seed), Split.TRAIN, 1000, asked=4)
        assert all(split_of(fact.key) is Split.TRAIN for fact in document.facts)


def test_what_a_held_back_document_is_asked_about_was_never_in_training() -> None:
    document = sample_document(Random(1), Split.HELD_BACK, 1000, asked=4)
    assert all(split_of(fact.key) is Split.HELD_BACK for fact in document.facts[:4])


def test_a_document_states_each_asked_fact_once_and_without_contradiction() -> None:
    for seed in range(50):
        document = sample_document(Random(seed), Split.HELD_BACK, 2000, asked=4)
        topics = [fact.topic for fact in document.facts]
        assert len(set(topics)) == len(topics)
        assert all(fact.value in document.text for fact in document.facts)


def test_questions_of_a_group_share_their_document() -> None:
    texts = [item.messages[0]["content"].rsplit("\n\n", 1) for item in some("recall", "1k", 8)]
    assert len({document for document, _ in texts}) == 2
    assert len({question for _, question in texts}) == 8


@pytest.mark.parametrize(("name", "size"), EVERY_SIZE)
def test_the_expected_answer_is_right_and_others_are_not(name: str, size: str) -> None:
    for item in some(name, size, 20):
        assert check(item, right_answer(item)).right
        assert not check(item, "").right
        assert not check(item, item.expected + " 7").right
        assert not check(item, right_answer(item)[: len(right_answer(item)) // 2]).right


def test_sums_and_lists_have_the_answers_of_arithmetic_and_order() -> None:
    for item in some("arithmetic", "difference-3", 50):
        a, b = map(int, item.key.split(" - "))
        assert int(item.expected) == a - b
    for item in some("lists", "sort-words-long", 50):
        assert item.expected.split(", ") == sorted(item.key.removeprefix("list|").split(","))


def test_json_may_be_valid_without_being_right() -> None:
    item = some("json", "3", 1)[0]
    wrong = json.dumps(json.loads(item.expected) | {"extra": 1})
    assert check(item, wrong).valid
    assert not check(item, wrong).right
    assert not check(item, item.expected[:-1]).valid


def test_json_may_be_spelled_in_any_way() -> None:
    item = some("json", "3", 1)[0]
    assert check(item, json.dumps(json.loads(item.expected), indent=2, sort_keys=True)).right


def test_a_call_of_a_tool_that_was_not_offered_is_not_valid() -> None:
    item = some("tools", "2", 1)[0]
    assert not check(item, '<tool_call>\n{"name": "launch", "arguments": {}}\n</tool_call>').valid
    name = item.tools[0]["function"]["name"]
    assert check(item, f'<tool_call>\n{{"name": "{name}", "arguments": {{}}}}\n</tool_call>').valid


def test_a_call_uses_the_offered_parameters() -> None:
    for item in some("tools", "4", 50):
        call = json.loads(item.expected.splitlines()[1])
        function = next(t["function"] for t in item.tools if t["function"]["name"] == call["name"])
        assert set(function["parameters"]["required"]) <= set(call["arguments"])
        assert set(call["arguments"]) <= set(function["parameters"]["properties"])


def test_an_open_count_must_go_on_to_its_limit() -> None:
    item = replace(some("counting", "open", 1)[0], max_tokens=100)
    assert check(item, item.expected[:100]).right
    assert not check(item, item.expected[:60]).right
    assert not check(item, item.expected[:90] + "x" * 10).right


def test_sampled_stories_are_valid_though_only_the_likeliest_is_right() -> None:
    told = some("story", "named", 50, Split.TRAIN)
    for item in told:
        assert check(item, item.expected).valid
    assert len({item.expected for item in told}) == 50
    assert not check(told[0], told[0].expected.replace("The end.", "The")).valid


@pytest.mark.parametrize(
    "words",
    [v.FIRST_NAMES, v.LAST_NAMES, v.TOWNS, v.ADJECTIVES, v.OBJECTS, v.ANIMALS, v.FOODS, v.JOBS, v.PLACES, v.COLOURS],
)
def test_no_word_is_listed_twice(words: tuple[str, ...]) -> None:
    assert len(set(words)) == len(words)


def test_unknown_names_are_answered_with_those_that_exist() -> None:
    with pytest.raises(KeyError, match="recall"):
        load("juggling")
    with pytest.raises(KeyError, match="sum-2"):
        next(items("arithmetic", Split.TRAIN, "sum-9"))
