"""Tests that the parser reads the calls that its grammar enforces, and that grammars can be compiled from them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from quire.services.frontend.input_processor.grammars.grammar_validator import GrammarValidator
from quire.services.frontend.output_processor import constraint
from quire.services.frontend.output_processor.constraint import AnswerStart
from quire.services.frontend.output_processor.parsing import call_grammar, registry
from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Reasoning
from quire.services.frontend.output_processor.reasoning_parsers.muse_glimmer import TOKENS as MUSE_TOKENS
from quire.services.frontend.request.request import Tool
from quire.services.frontend.request.tool_offer import text_tool
from quire.shared.structured_output.literals import NO_SPECIAL_TOKENS
from tests.services.frontend.output_processor.parsers.reading import TOOLS, calls_in, reasoning_in

WITH_GRAMMARS = sorted(name for name in registry.TOOL_PARSERS if registry.tool_format(name).grammars)
VALUES = {"integer": 5, "string": "some text", "array": [True], "boolean": True}


def written(format: dict[str, Any], random: Random) -> str:
    """Returns a random text that the format allows."""
    inner = format.get("content")
    parts = {
        "const_string": lambda: str(format["value"]),
        "sequence": lambda: "".join(written(element, random) for element in format["elements"]),
        "or": lambda: written(random.choice(format["elements"]), random),
        "optional": lambda: written(inner, random) if random.random() < 0.5 else "",
        "star": lambda: "".join(written(inner, random) for _ in range(random.randrange(3))),
        "tag": lambda: format["begin"] + written(inner, random) + format["end"],
        "any_text": lambda: "some\ntext",
        "regex": lambda: "7" if "0-9" in format["pattern"] else "\n",
        "json_schema": lambda: json.dumps(instance(format["json_schema"])),
    }
    return parts[format["type"]]()


def instance(schema: dict[str, Any]) -> Any:
    if schema.get("type") == "object":
        return {key: instance(value) for key, value in schema.get("properties", {}).items()}
    return [True] if "$ref" in schema else VALUES.get(schema.get("type", ""))


@pytest.mark.parametrize("name", WITH_GRAMMARS)
def test_enforced_calls_are_read_back(name: str) -> None:
    for grammar_format in registry.tool_format(name).grammars:
        for seed in range(30):
            text = written(call_grammar.calls(grammar_format, TOOLS, only_one=False), Random(seed))
            if name in registry.REASONING_PARSERS and registry.tool_format(name).tokens == MUSE_TOKENS:
                text = "".join(part.text for part in reasoning_in(name, [text]) if isinstance(part, Content))
            events = calls_in(name, [text])
            assert {type(event) for event in events} == {CallStart, CallArguments}
            for start, arguments in zip(events[::2], events[1::2], strict=True):
                assert isinstance(start, CallStart)
                assert isinstance(arguments, CallArguments)
                values = json.loads(arguments.text)
                flags = [True for _ in values.get("d", [True])]  # elements of a list occur any number of times
                expected = {"a": 5, "b": values.get("b"), "c": None, "d": flags} if start.name == "add" else {}
                assert {**expected, **values} == expected
                assert values.get("b", "some text").split() == ["some", "text"]


NESTED = Tool(
    "book",
    {
        "type": "object",
        "properties": {
            "who": {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}},
            "legs": {"type": "array", "items": {"$ref": "#/$defs/leg"}},
            "notes": {"type": "object"},
            "class": {"type": "string", "enum": ["first", "second"]},
        },
        "required": ["who", "legs", "notes", "class"],
        "$defs": {"leg": {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}},
    },
)


def test_nested_arguments_are_elements_and_are_read_back(validator: GrammarValidator) -> None:
    """Required calls of MiniMax M3 were plain JSON, which the model does not write."""
    grammar_format = registry.tool_format("minimax_m3").grammars[0]
    answer = call_grammar.calls(grammar_format, [NESTED], only_one=True)
    asyncio.run(validator.check(constraint.structural_tag(answer, None)))
    for seed in range(20):
        text = written(answer, Random(seed))
        assert text.startswith(']<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name="book">]<]minimax[>[<who>')
        start, arguments = calls_in("minimax_m3", [text], (NESTED,))
        assert start == CallStart("book")
        assert isinstance(arguments, CallArguments)
        found = json.loads(arguments.text)
        assert found["class"] in ("first", "second")
        assert found["notes"] == {}
        assert found["who"].items() <= {"name": "some\ntext", "age": 5}.items()
        assert all(leg == {"to": "some\ntext"} for leg in found["legs"])


def test_a_schema_that_refers_to_itself_ends_in_json(validator: GrammarValidator) -> None:
    tree = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}}
    tool = Tool("grow", {"type": "object", "properties": {"tree": {"$ref": "#/$defs/tree"}}, "$defs": {"tree": tree}})
    answer = call_grammar.calls(registry.tool_format("minimax_m3").grammars[0], [tool], only_one=True)
    asyncio.run(validator.check(constraint.structural_tag(answer, None)))


@pytest.fixture(scope="module")
def validator() -> Iterator[GrammarValidator]:
    made = GrammarValidator(NO_SPECIAL_TOKENS, 10)
    yield made
    made.close()


@pytest.mark.parametrize("name", WITH_GRAMMARS)
def test_grammars_of_the_formats_compile(name: str, validator: GrammarValidator) -> None:
    for grammar_format in registry.tool_format(name).grammars:
        for only_one in (False, True):
            answer = call_grammar.calls(grammar_format, TOOLS, only_one=only_one)
            for place in AnswerStart:
                reasoning = registry.reasoning_format(
                    {"openai": "openai_gptoss", "muse_glimmer": name}.get(name, "qwen3")
                )
                form = constraint.structural_tag(constraint.after_reasoning(answer, reasoning, place), None)
                asyncio.run(validator.check(form))


def test_a_named_function_allows_only_one_call() -> None:
    grammar_format = registry.tool_format("hermes").grammars[0]
    for seed in range(20):
        text = written(call_grammar.calls(grammar_format, TOOLS, only_one=True), Random(seed))
        assert text.count("<tool_call>") == 1


def test_reasoning_may_come_first() -> None:
    for name in ("qwen3", "openai_gptoss", "muse_glimmer"):
        found = registry.reasoning_format(name)
        answer = call_grammar.sequence(found.content_start, "Yes.")
        for place, is_open in ((AnswerStart.BEFORE_REASONING, False), (AnswerStart.IN_REASONING, True)):
            if found.content_start and is_open:
                continue  # its prompts never begin reasoning
            texts = [written(constraint.after_reasoning(answer, found, place), Random(seed)) for seed in range(20)]
            for text in texts:
                events = reasoning_in(name, [text], is_open=is_open)
                assert events[-1].text == "Yes."  # type: ignore[union-attr]
                assert all(event == Reasoning("some\ntext") for event in events[:-1])
            assert any(len(reasoning_in(name, [text], is_open=is_open)) == 2 for text in texts)


@pytest.mark.parametrize(
    ("name", "syntax", "definition", "said", "is_held"),
    [
        ("qwen3_coder", "lark", 'start: "a" /b+/', "abb", True),
        ("hy_v3", "lark", 'start: "a" /b+/', "abb", True),
        ("kimi_k3", "regex", "ab+", "abb", True),
        ("hermes", "regex", "ab+", "abb", True),
        ("hermes", "lark", 'start: "a" /b+/', "abb", False),  # the text is part of a JSON string
    ],
)
def test_the_input_of_a_custom_tool_fits_its_grammar(
    name: str, syntax: str, definition: str, said: str, is_held: bool, validator: GrammarValidator
) -> None:
    grammar = {"syntax": syntax, "definition": definition}
    tool = text_tool("tools[0]", "patch", None, {"type": "grammar"}, grammar)
    grammar_format = registry.tool_format(name).grammars[-1]
    assert grammar_format.enforces(tool) is is_held
    answer = call_grammar.calls(grammar_format, [tool], only_one=True)
    kinds = {"lark": '"type": "grammar"', "regex": definition}
    assert (kinds[syntax] in json.dumps(answer)) is is_held
    asyncio.run(validator.check(constraint.structural_tag(answer, None)))
    spoken = answer_with(answer, said)
    start, arguments = calls_in(name, [spoken], (tool,))
    assert (start, arguments) == (CallStart("patch"), CallArguments(json.dumps({"input": said})))


def answer_with(format: dict[str, Any], said: str) -> str:
    """Returns a text that the format allows, with the tool's input `said`."""
    match format["type"]:
        case "const_string":
            return str(format["value"])
        case "sequence":
            return "".join(answer_with(element, said) for element in format["elements"])
        case "tag":
            return str(format["begin"]) + answer_with(format["content"], said) + str(format["end"])
        case "json_schema":
            return json.dumps({"input": said})
        case "regex" if "0-9" in format["pattern"]:
            return "1"
    return said
