"""Tests of gpt-oss's messages: headers as models really write them, and the resulting calls."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import pytest

from quire.services.frontend.output_processor.answer_parser import AnswerParser, CallDelta, Part, append_part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.markup.harmony import TOKENS, read_messages
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.values.json_repair import IncrementalJson
from tests.services.frontend.output_processor.parsers.reading import answer_in, pieces

OFFERED = ("get_weather", "now", "math.sum", "web-browsing")
CITY = '{"city": "Malmö"}'
BODY = f"<|message|>{CITY}<|call|>"
WEATHER = ("get_weather", {"city": "Malmö"})
ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
START = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>Hi<|return|>"
HM, HI = Reasoning("Hm."), Content("Hi")

Found = Reasoning | Content | tuple[str, Any]

HEADERS: list[tuple[str, str]] = [
    ("the recipient behind the channel", "<|channel|>commentary to=functions.get_weather <|constrain|>json"),
    ("the prompt ended behind the role", " to=functions.get_weather<|channel|>commentary <|constrain|>json"),
    ("the recipient behind the role", f"{START} to=functions.get_weather<|channel|>commentary json"),
    ("no type", " to=functions.get_weather<|channel|>commentary"),
    ("an unknown type: openai/harmony#60", "<|channel|>commentary to=functions.get_weather <|constrain|>response"),
    ("no space: llama.cpp PR 15158", "<|channel|>commentary to=functions.get_weather<|constrain|>json"),
    ("the type glued on: llama.cpp PR 15158", "<|channel|>commentary to=functions.get_weatherjson"),
    ("dashes: openai/harmony#38", f"{START}<|channel|>––commentary to=functions.get_weather <|constrain|>json"),
    ("analysis: model_server PR 3863", "<|channel|>analysis to=functions.get_weather <|constrain|>json"),
    ("no prefix: vllm tests of HarmonyParser", " to=get_weather<|channel|>commentary json"),
    ("the channel's marker doubled", "<|channel|><|channel|>commentary to=functions.get_weather <|constrain|>json"),
    ("the start doubled", f"{START}{START}<|channel|>commentary to=functions.get_weather <|constrain|>json"),
    ("no marker of the channel", f"{START} commentary to=functions.get_weather <|constrain|>json"),
    (
        "a call to oneself around: llama.cpp#27720",
        "<|channel|>commentary to=assistant<|channel|>commentary to=functions.get_weather json",
    ),
]

ANSWERS: list[tuple[str, str, list[Found]]] = [
    ("no end of the analysis", f"<|channel|>analysis<|message|>Hm.{START}{FINAL}", [HM, HI]),
    ("neither end nor start", f"<|channel|>analysis<|message|>Hm.{FINAL}", [HM, HI]),
    ("no start", f"{ANALYSIS}assistant{FINAL}", [HM, HI]),
    ("no message marker: vllm#45736", f"{ANALYSIS}{START}<|channel|>final Hi<|return|>", [HM, HI]),
    ("only a type: openai/harmony#60", "<|channel|>final <|constrain|>response<|message|>Hi<|return|>", [HI]),
    ("free text: llama.cpp#27720", f"<|channel|>commentary? we need <|end|>{START}{ANALYSIS}{START}{FINAL}", [HM, HI]),
    ("an unknown channel", f"{ANALYSIS}{START}<|channel|>summary<|message|>Hi<|end|>", [HM, HI]),
    ("no channel at all: llama.cpp#25321", '{"answer": 4}', [Content('{"answer": 4}')]),
    ("a prefix continued", " final words<|return|>", [Content(" final words")]),
    (
        "a preamble",
        f"<|channel|>commentary<|message|>I look.<|end|>{START} to=functions.get_weather<|channel|>commentary{BODY}",
        [Content("I look."), WEATHER],
    ),
    ("a preamble and an answer", f"<|channel|>commentary<|message|>So:<|end|>{START}{FINAL}", [Content("So:\nHi")]),
    (
        "to itself: llama.cpp PR 21286",
        f"<|channel|>commentary to=assistant<|message|>Hm.<|end|>{START}{FINAL}",
        [HM, HI],
    ),
    ("a built-in tool", "<|channel|>analysis to=python code<|message|>print(1)<|call|>", [Reasoning("print(1)")]),
    ("an invented tool", f"<|channel|>commentary to=functions.get_wether json{BODY}", [Content(CITY)]),
    (
        "a result that it invents: mlx-lm#875",
        f"<|start|>functions.now to=assistant<|channel|>commentary<|message|>12:00<|end|>{START}{FINAL}",
        [Reasoning("12:00"), HI],
    ),
    (
        "two calls, the first without end",
        f" to=functions.get_weather<|channel|>commentary<|message|>{CITY}{START} to=functions.now<|channel|>commentary"
        "<|message|>{}",
        [WEATHER, ("now", {})],
    ),
    (
        "no arguments: vllm tests of HarmonyParser",
        " to=functions.now<|channel|>commentary<|message|><|call|>",
        [("now", {})],
    ),
    (
        "no arguments, and a stop token that is not shown",
        " to=functions.now<|channel|>commentary<|message|>",
        [("now", {})],
    ),
    (
        "unreadable arguments",
        "<|channel|>commentary to=functions.now json<|message|>{now}",
        [Content("{now}")],
    ),
    (
        "code for arguments",
        "<|channel|>commentary to=functions.now code<|message|>print(1)<|call|>",
        [Content("print(1)")],
    ),
    ("one bracket too many", f" to=functions.get_weather<|channel|>commentary<|message|>{CITY}}}<|call|>", [WEATHER]),
    (
        "the type behind the message marker",
        f"<|channel|>commentary to=functions.get_weather <|message|>json<|constrain|>{CITY}<|call|>",
        [WEATHER],
    ),
    (
        "no message marker of a call",
        f"<|channel|>commentary to=functions.get_weather <|constrain|>json{CITY}<|call|>",
        [WEATHER],
    ),
    (
        "a dotted name",
        '<|channel|>commentary to=functions.math.sum json<|message|>{"a": 2}<|call|>',
        [("math.sum", {"a": 2})],
    ),
    (
        "a dash: vllm#51977",
        "<|channel|>commentary to=functions.web-browsing json<|message|>{}<|call|>",
        [("web-browsing", {})],
    ),
]


def read(parts: list[str], *, is_open: bool = False) -> list[Found]:
    parser = AnswerParser(
        None,
        MarkupReader(lambda scan, writer: read_messages(scan, writer, is_open, OFFERED.__contains__)),
        new_id=lambda number, _name: f"call_{number}",
        most_calls=None,
        wants_reasoning=True,
    )
    joined: list[Part] = []
    for part in [part for text in parts for part in parser.push(text)] + parser.finish():
        append_part(joined, part)
    return [(part.name, json.loads(part.arguments)) if isinstance(part, CallDelta) else part for part in joined]


def check(text: str, expected: list[Found]) -> None:
    assert read([text]) == expected
    assert read(list(text)) == expected
    assert all(read(pieces(text, [cut])) == expected for cut in range(1, len(text)))


@pytest.mark.parametrize("header", [header for _, header in HEADERS], ids=[what for what, _ in HEADERS])
def test_calls_are_recognized_by_their_recipient(header: str) -> None:
    check(header + BODY, [WEATHER])
    check(f"{ANALYSIS}{START if not header.startswith(START) else ''}{header}{BODY}", [HM, WEATHER])


@pytest.mark.parametrize(("text", "expected"), [row[1:] for row in ANSWERS], ids=[row[0] for row in ANSWERS])
def test_messages_are_distinguished(text: str, expected: list[Found]) -> None:
    check(text, expected)


def test_the_prompt_may_begin_the_analysis() -> None:
    assert read([f"Hm.<|end|>{START}{FINAL}"], is_open=True) == [HM, HI]


def test_truncated_calls_have_complete_arguments_or_are_dropped() -> None:
    arguments = {"city": 'Malmö "Süd"\n', "days": [1, -2.5, {"a": None}], "units": {"wind": True}}
    text = f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{json.dumps(arguments)}"
    for end in range(len(text)):
        found = read([text[:end]])
        if "functions." in text[:end]:
            assert len(found) <= 1
            assert all(part[0] == "get_weather" and part[1].keys() <= arguments.keys() for part in found)
    assert read([text]) == [("get_weather", arguments)]


def test_reasoning_and_tool_parsers_in_sequence_find_the_same() -> None:
    text = f"{ANALYSIS}{START} to=functions.now<|channel|>commentary <|constrain|>json<|message|>{{}}<|call|>"
    assert answer_in("openai_gptoss", "openai", [text], is_open=False) == [HM, CallDelta(0, "call-0", "now", "{}")]


def test_markers_never_reach_the_user() -> None:
    parts = (
        *TOKENS,
        *TOKENS,
        "assistant",
        "analysis",
        "commentary",
        "final",
        " to=functions.now",
        "json",
        "{}",
        '{"a": ',
        "w",
    )
    for seed in range(3000):
        random = Random(seed)
        text = "".join(random.choices(parts, k=random.randrange(1, 14)))
        found = read([text])
        assert read(list(text)) == found
        texts = [part.text for part in found if isinstance(part, Content | Reasoning)]
        assert not any(token in shown for shown in texts for token in TOKENS), text


BAD_JSON = [
    ('{"a": 1,}', {"a": 1}),
    ('{"a": [1, 2,],}', {"a": [1, 2]}),
    ('{"a": True, "b": None}', {"a": True, "b": None}),
    ('{"a": "x\ny\t"}', {"a": "x\ny\t"}),
    ('{"a": "C:\\dir \\u12 \\u00e9"}', {"a": "C:\\dir \\u12 é"}),
    ('{"a": "half', {"a": "half"}),
    ('{"a": "half\\', {"a": "half"}),
    ('{"a": 1, "b": {"c": [tr', {"a": 1}),
    ('{"a": 1, b: 2}', {"a": 1, "b": 2}),
    ('{"a": NaN}', {"a": None}),
    ('{"a": <b>}', None),
    ('{"a"', None),
    ("[1]", None),
]


@pytest.mark.parametrize(("text", "expected"), BAD_JSON)
def test_arguments_become_objects(text: str, expected: Any) -> None:
    for parts in ([text], list(text)):
        written: list[str] = []
        out = ArgumentsWriter(written.append)
        arguments = IncrementalJson(out)
        for part in parts:
            arguments.push(part)
        out.finish()
        assert (json.loads("".join(written)) if written else None) == expected
