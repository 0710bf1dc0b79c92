"""Tests of templates and conversations that other servers were reported to refuse or to render wrongly.

The templates are reduced to the subject of the report.
"""

from __future__ import annotations

import re
from typing import Any

import pytest

from quire.services.frontend.tokenizer.chat_template import ChatTemplate
from quire.shared.errors import InvalidArgument
from tests.services.frontend.tokenizer import template_conversations as sent
from tests.services.frontend.tokenizer.template_conversations import ClientConversation, turn

ALTERNATING = """{{ bos_token }}{% for message in messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{%- if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}
{%- elif message['role'] == 'assistant' %}{{ message['content'] + eos_token }}
{%- else %}{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"""
GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}
{%- endif %}{% for message in messages %}{{ '<start_of_turn>' + message['role'] + '\\n' + message['content'] | trim
+ '<end_of_turn>\\n' }}{% endfor %}"""
MINISTRAL = """{{ bos_token }}{% for message in messages %}
{%- if message.role not in ['user', 'assistant', 'tool'] %}
{{- raise_exception('Only user, assistant and tool roles are supported, got ' + message.role + '.') }}{% endif %}
{{- '[' + message.role + ']' + (message.content or '') }}{% endfor %}"""
BRIEF, ASK = turn("system", "Be brief."), turn("user", "The capital of Ontario?")
WORDS = ("Be brief.", "The capital of Ontario?")


@pytest.mark.parametrize(
    ("source", "messages", "words"),
    [
        (ALTERNATING, [BRIEF, ASK], WORDS),  # autogen#1037, mistral.rs#45
        (GEMMA, [BRIEF, ASK], WORDS),  # sglang#892, chat-ui#1386, mistral.rs#506
        (MINISTRAL, [BRIEF, ASK], WORDS),  # opencode#5034
        (  # vllm#6862
            ALTERNATING,
            [BRIEF, ASK, turn("user", "And its history?")],
            (*WORDS, "And its history?"),
        ),
        (ALTERNATING, [ASK, turn("user", "Quickly!"), turn("user", "Now!")], ("Ontario?", "Quickly!", "Now!")),
        (GEMMA, [BRIEF], ("Be brief.",)),  # mistral.rs#506: instructions only
    ],
)
def test_parts_unknown_to_a_template_are_shown_in_known_parts(source: str, messages: Any, words: Any) -> None:
    shown = sent.render(sent.renderer_of(source), ClientConversation(messages, words))
    assert all(word in shown for word in words), shown
    assert [shown.index(word) for word in words] == sorted(shown.index(word) for word in words)


def render(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    template = ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(messages, add_generation_prompt=True, continue_final_message=False, variables=variables)


@pytest.mark.parametrize(
    ("source", "shown"),
    [
        # lmstudio#577: other parts of a date than %Y-%m-%d
        ("{{ strftime_now('%d %B %Y, %H:%M:%S') }}", r"\d\d \w+ \d{4}, \d\d:\d\d:\d\d"),
        # llama.cpp#12231, jan#6123: methods of a filter's result
        (
            "{% set m = messages[0].content %}{{ (m.split('</think>') | first).rstrip('\\n') + '|' "
            "+ (m.split('</think>') | last).lstrip('\\n') }}",
            r"hm\|Yes\.",
        ),
        # llama.cpp#11443, llama-cpp-python PR 2018
        ("{% for i in [1, 2, 3] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% break %}{% endfor %}", "2"),
        # llama.cpp#12729: a date that the template sets itself unless it is given
        (
            "{% if not date_string is defined %}{% set date_string = '26 Jul 2024' %}{% endif %}{{ date_string }}",
            "26 Jul 2024",
        ),
        ("{{ [{'a': 1}] | tojson(indent=4) }}", r"\[\n {4}\{\n {8}\"a\": 1\n {4}\}\n\]"),
        # mlx-examples#1195: content that may be a list
        (
            "{% set c = messages[0].content %}{% if c is string %}{{ c[:2] }}{% else %}{{ c[0].text }}{% endif %}",
            "hm",
        ),
        # llama.cpp#5040: tokens by name
        ("{{ bos_token }}{{ eos_token }}", "<s></s>"),
    ],
)
def test_features_that_templates_use(source: str, shown: str) -> None:
    text = render(source, [turn("assistant", "hm\n</think>\n\nYes.")])
    assert re.fullmatch(shown, text), text


def test_undefined_values_in_json_are_request_errors() -> None:
    """Checks sglang PR 20700: tojson of a key that a tool does not have was an internal error."""
    with pytest.raises(InvalidArgument) as refused:
        render("{{ tools[0].function | tojson }}", [turn("user", "x")], tools=[{"name": "flat"}])
    assert refused.value.field == "messages"


def test_a_variable_of_the_request_counts() -> None:
    """Checks llama.cpp#12729: a variable of the request overrides the default."""
    made = sent.renderer_of("{{ date_string | default('26 Jul 2024') }} {{ messages[0].content }}")
    assert sent.render(made, ClientConversation([ASK], ())).startswith("26 Jul 2024")
    assert sent.render(made, ClientConversation([ASK], (), variables={"date_string": "1 Jan 2030"})).startswith(
        "1 Jan 2030"
    )
