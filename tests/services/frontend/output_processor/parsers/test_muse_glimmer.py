"""Tests of Muse Glimmer's messages, as models and other servers' tests write them."""

from __future__ import annotations

import json

import pytest

from quire.services.frontend.output_processor.answer_parser import CallDelta
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from tests.services.frontend.output_processor.parsers.reading import answer_in, pieces

BODY = (
    '<atem:function_calls>\n<atem:invoke name="NAME">\n<atem:parameter name="a">1</atem:parameter>\n'
    '<atem:parameter name="b"> to=x </atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)
ADD, START = BODY.replace("NAME", "add"), "<|start|>assistant"
THOUGHT, CALL = Reasoning("Hm."), ("add", {"a": 1, "b": " to=x "})

ANSWERS: list[tuple[str, str, list[object]]] = [
    ("an answer", f" to=self<|message|>Hm.<|eom|>{START} to=user<|message|>Hi<|eot|>", [THOUGHT, Content("Hi")]),
    ("no reasoning", " to=user<|message|>Hi", [Content("Hi")]),
    ("no recipient", "<|message|>Hi<|eot|>", [Content("Hi")]),
    ("no header", "Just a direct answer.", [Content("Just a direct answer.")]),
    ("cut off", " to=self<|message|>Hm.", [THOUGHT]),
    ("a call", f" to=self<|message|>Hm.<|eom|>{START} to=add<|message|>{ADD}<|eot|>", [THOUGHT, CALL]),
    (
        "calls in messages of their own: vllm PR 57488",
        f"{START} to=add<|message|>{ADD}<|eom|>{START} to=add<|message|>{ADD}<|eot|>",
        [CALL, CALL],
    ),
    (
        "no end before the call: osaurus#2354",
        f" to=self<|message|>Hm. to=add<|message|>{ADD}",
        [Reasoning("Hm. "), CALL],
    ),
    (
        "the name once more as its namespace: vllm's test_muse_glimmer_parsers",
        f" to=add.add<|message|>{BODY.replace('NAME', 'add.add')}<|eot|>",
        [CALL],
    ),
    ("another namespace", f" to=x.add<|message|>{BODY.replace('NAME', 'x.add')}<|eot|>", [CALL]),
    (
        "a call that reasoning quotes: vllm's test_muse_glimmer_parsers",
        f" to=self<|message|>{ADD} not.<|eom|>{START} to=user<|message|>42<|eot|>",
        [Reasoning(f"{ADD} not."), Content("42")],
    ),
    ("text that looks like a header", " to=user<|message|>Mail to=ann.", [Content("Mail to=ann.")]),
]


@pytest.mark.parametrize(("_name", "text", "expected"), ANSWERS, ids=[name for name, *_ in ANSWERS])
def test_messages(_name: str, text: str, expected: list[object]) -> None:
    for size in (len(text), 1, 3, 17):
        parts = answer_in("muse_glimmer", "muse_glimmer", pieces(text, range(0, len(text), size)), is_open=False)
        calls = [(part.name, json.loads(part.arguments)) if isinstance(part, CallDelta) else part for part in parts]
        assert calls == expected, size


def test_a_prompt_that_ends_within_reasoning() -> None:
    text = f"Hm.<|eom|>{START} to=user<|message|>Hi<|eot|>"
    assert answer_in("muse_glimmer", "muse_glimmer", [text]) == [THOUGHT, Content("Hi")]
