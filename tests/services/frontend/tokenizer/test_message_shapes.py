"""Tests of the templates of 68 families with 25 conversations each, compared with transformers' rendering.

Where transformers shows everything, our rendering is equal; elsewhere it shows the rest as well. Reference:
transformers' own apply_chat_template, with its normalisation, with arguments as an object or, where that does not show
everything, as JSON text.
"""

from __future__ import annotations

import pytest

from quire.services.frontend.request.conversation import NO_JSON
from quire.services.frontend.request.request import ChatPrompt
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape
from tests.services.frontend.tokenizer import template_conversations as sent
from tests.services.frontend.tokenizer.template_conversations import (
    CONVERSATIONS,
    FIVE,
    TOOLS,
    ClientConversation,
    call,
    looped,
)
from tests.services.frontend.tokenizer.template_families import FAMILIES, source

# Expected shape of some families, by the reports that asked for it.
SHAPES = {
    "deepseek r1 distill": {"call_content": "null", "arguments": "text", "call_text": "split"},  # sglang#9898
    "functionary 3.2": {"arguments": "text"},
    "gemma 2": {"system_turns": "user", "user_turns": "merged", "calls": "text", "results": "user"},
    "glm 4.6": {"call_content": "given"},
    "gpt-oss": {"parallel_calls": "split", "call_reasoning": "joined"},  # llama.cpp#19701
    "kimi k2": {"call_ids": "function"},
    "llama 3.1": {"parallel_calls": "split"},
    "llama guard": {"user": "parts"},  # vllm#9294
    "ministral 3": {"reasoning": "parts"},
    "mistral nemo": {"call_ids": "nine", "system_turns": "merged", "call_text": "gathered"},  # opencode#1680
    "qwen2.5": {},
    "qwen3": {"call_content": "empty"},  # transformers#45419
    "qwen3.5": {"developer": "system", "system_turns": "merged"},  # lmstudio#2298
    "hermes 3": {"tools": "list"},
}


def references(family: str, conversation: ClientConversation) -> list[str]:
    """Returns transformers' renderings that show every word."""
    text = source(family)
    made = [sent.render_with_transformers(text, conversation, as_text=as_text) for as_text in (False, True)]
    return [shown for shown in made if shown is not None and not sent.missing(text, conversation, shown)]


@pytest.mark.parametrize("family", FAMILIES)
def test_all_parts_are_shown_and_as_by_transformers_where_it_shows_all(family: str) -> None:
    text = source(family)
    rendering = sent.renderer_of(text)
    for name, conversation in CONVERSATIONS.items():
        shown = sent.render(rendering, conversation)
        assert sent.missing(text, conversation, shown) == [], name
        if "developer" in name and "developer" not in text:
            continue  # a template that writes any role need not mean that its model knows it
        complete = references(family, conversation)
        with_thoughts = [one for one in complete if all(word in one for word in conversation.thoughts)]
        if complete and (with_thoughts or not all(word in shown for word in conversation.thoughts)):
            assert shown in (with_thoughts or complete), name


@pytest.mark.parametrize("family", SHAPES)
def test_each_family_has_the_expected_shape(family: str) -> None:
    shape = sent.renderer_of(source(family)).shape(tools=True)
    expected = SHAPES[family]
    assert {name: getattr(shape, name) for name in expected} == expected
    if not expected:
        assert set(shape.changes()) <= {"user", "system", "assistant", "tool", "developer"}


@pytest.mark.parametrize(
    ("family", "shown"),
    [
        ("gpt-oss", True),  # vllm#27653: it reads thinking
        ("ministral 3", True),  # parts of type thinking
        ("lfm2.5 thinking", True),
        ("solar open", True),  # it reads reasoning
        ("glm 4.6", True),
        ("qwen3", True),
        ("qwen2.5", False),  # it has no place for reasoning
    ],
)
@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
def test_reasoning_between_calls_is_shown_under_each_field_name(family: str, shown: bool, field: str) -> None:
    rendering = sent.renderer_of(source(family))
    text = sent.render(rendering, ClientConversation(sent.loop(None, **{field: "look_first"}), (), tools=TOOLS))
    assert ("look_first" in text) is shown
    assert text.count("look_first") == shown


@pytest.mark.parametrize("family", ["mistral nemo", "mistral small 3.2", "mistral 7b v0.3"])
@pytest.mark.parametrize(
    "call_id", ["call_PTLP8xhu3uwZk4l3nlnrrJha", "call_0", "toolu_01A09q90qw90lq917835lq9", "", "VvvODy9mT"]
)
def test_ids_of_mistral_are_nine_letters_or_digits_and_stay_where_they_are(family: str, call_id: str) -> None:
    rendering = sent.renderer_of(source(family))
    result = {"role": "tool", "content": "rain_at_five", **({"tool_call_id": call_id} if call_id else {})}
    one = ClientConversation([sent.ASK, looped(None, call(call_id, "get_weather", "{}")), result], (), tools=TOOLS)
    text = sent.render(rendering, one)
    assert text == sent.render(rendering, one)
    assert ("VvvODy9mT" in text) is (call_id == "VvvODy9mT")
    assert "rain_at_five" in text


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ({"a": 1, "b": 2}, '{"a": 1, "b": 2}'),  # deer-flow#4445
        ('{"a":1,"b":2}', '{"a": 1, "b": 2}'),
        ('"{\\"a\\": 1}"', '{"a": 1}'),  # encoded twice
        ("", "{}"),
        ("null", "{}"),
        ("[1]", f'{{"{NO_JSON}": "[1]"}}'),
        ('{"a": ', f'{{"{NO_JSON}": "{{\\"a\\": "}}'),
    ],
)
def test_arguments_of_earlier_calls(arguments: object, shown: str) -> None:
    rendering = sent.renderer_of(source("qwen2.5"))
    text = sent.render(
        rendering, ClientConversation([sent.ASK, looped(None, call("a", "add", arguments)), FIVE], (), tools=TOOLS)
    )
    assert f'"arguments": {shown}}}' in text


def test_templates_that_read_text_get_the_clients_text() -> None:
    rendering = sent.renderer_of(source("functionary 3.2"))
    for arguments in ('{"a":1,   "b":2}', '{"a": '):
        text = sent.render(
            rendering, ClientConversation([sent.ASK, looped(None, call("a", "add", arguments)), FIVE], (), tools=TOOLS)
        )
        assert f"\n{arguments}\n" in text


def test_texts_between_calls_stay_in_order_where_turns_alternate() -> None:
    rendering = sent.renderer_of(source("mistral nemo"))
    turns = [sent.ASK, looped("First."), FIVE, looped("Second.", sent.TIME), sent.NOON, sent.SAID, sent.THANKS]
    text = sent.render(rendering, ClientConversation(turns, (), tools=TOOLS))
    places = [text.index(word) for word in ("Oslofjord", "Tromsdal", "First.", "Second.", "Five degrees.")]
    assert places == sorted(places)


def test_reordered_results_follow_their_calls_where_each_call_is_a_turn() -> None:
    rendering = sent.renderer_of(source("gpt-oss"))
    turns = [sent.ASK, looped(None, sent.OSLO, sent.TIME), sent.NOON, FIVE]
    text = sent.render(rendering, ClientConversation(turns, (), tools=TOOLS))
    places = [text.index(word) for word in ("Oslofjord", "rain_at_five", "Tromsdal", "noon_sharp")]
    assert places == sorted(places)
    assert '<|start|>functions.get_time to=assistant<|channel|>commentary<|message|>"noon_sharp"' in text


def test_the_open_answer_continues_after_its_last_part() -> None:
    rendering = sent.renderer_of(source("smolvlm"))
    last = {"role": "assistant", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two "}]}
    prompt = ChatPrompt([sent.ASK, last], add_generation_prompt=False, continue_final_message=True)
    assert rendering.sections(prompt)[0].text.endswith("One two")


def test_shaping_does_not_modify_the_given_messages() -> None:
    before = repr(CONVERSATIONS)
    for family in ("deepseek r1 distill", "mistral nemo", "gpt-oss", "gemma 2", "llama guard"):
        rendering = sent.renderer_of(source(family))
        for conversation in CONVERSATIONS.values():
            sent.render(rendering, conversation)
    assert repr(CONVERSATIONS) == before


def test_the_shape_is_a_value_and_describes_its_changes() -> None:
    assert MessageShape() == MessageShape()
    assert MessageShape().describe() == "as in transformers"
    assert MessageShape(arguments="text", call_content="null").describe() == "call_content=null, arguments=text"
    assert MessageShape().as_fields()["arguments"] == "object"
