"""Tests of every tool parser: its result for a family's answers, split anywhere, and for malformed ones."""

from __future__ import annotations

from random import Random

import pytest

from quire.services.frontend.output_processor.parsing import registry
from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.registry import tool_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.request.request import Tool
from quire.shared.errors import InvalidArgument
from tests.services.frontend.output_processor.parsers.reading import TOOLS, calls_in, pieces
from tests.services.frontend.output_processor.parsers.samples import BROKEN, CALLS, Expected, as_expected


def found(events: list[Event]) -> list[Expected]:
    """Returns content and calls in order."""
    result: list[Expected] = []
    for place, event in enumerate(events):
        if isinstance(event, Content):
            result.append(event.text)
        elif isinstance(event, CallStart):
            arguments = events[place + 1]
            assert isinstance(arguments, CallArguments)
            result.append(as_expected(event.name, arguments.text, event.id))
    return result


@pytest.mark.parametrize(("parser", "text", "expected"), [*CALLS, *BROKEN])
def test_calls_are_found_whole_or_cut_anywhere(parser: str, text: str, expected: list[Expected]) -> None:
    whole = calls_in(parser, [text])
    assert found(whole) == expected
    assert calls_in(parser, list(text)) == whole
    assert all(calls_in(parser, pieces(text, [cut])) == whole for cut in range(1, len(text)))
    random = Random(text)
    for _ in range(50):
        cuts = [random.randrange(len(text) + 1) for _ in range(random.randrange(1, 8))]
        assert calls_in(parser, pieces(text, cuts)) == whole


def test_a_name_that_is_not_offered_is_a_call_where_markers_show_that_it_is_one() -> None:
    by_name = {"functionary_v32", "llama3_json", "llama4_json", "openai", "pythonic", "xlam"}
    calling = {
        parser
        for parser, text, _ in CALLS
        if any(isinstance(event, CallStart) for event in calls_in(parser, [text], (Tool("elsewhere"),)))
    }
    assert {parser for parser, _, _ in CALLS} - calling == by_name


def test_every_parser_has_an_answer_here() -> None:
    assert {parser for parser, _, _ in CALLS} == set(registry.TOOL_PARSERS)


def test_strings_stream_before_they_end() -> None:
    """Checks that large arguments, such as a file's content, do not wait for their last character."""
    for parser, text in (
        ("hermes", '<tool_call>{"name": "add", "arguments": {"b": "first words'),
        ("qwen3_coder", "<function=add><parameter=b>first words"),
        ("pythonic", "[add(b='first words"),
        ("glm45", "<tool_call>add<arg_key>b</arg_key><arg_value>first words"),
        ("gemma4", '<|tool_call>call:add{b:<|"|>first words'),
    ):
        reader = MarkupReader(
            lambda scan, writer, name=parser: tool_format(name).read(scan, writer, ToolSchemas(TOOLS))
        )
        assert reader.push(text)[-1] == CallArguments('{"b": "first words')


def test_the_error_for_an_unknown_parser_lists_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=r"unknown parser 'hermez'; available: .*hermes, "):
        registry.tool_format("hermez")
    with pytest.raises(InvalidArgument, match=r"reasoning_parser: unknown parser 'x'; available: .*qwen3"):
        registry.reasoning_format("x")


def test_null_is_a_value_of_a_nullable_parameter() -> None:
    """Checks opencode#44262, dynamo frontend-crates PR 251: null of {type: integer, nullable: true} became a string."""
    for name, nullable, types in (("integer", True, {"integer", "null"}), ("string", False, {"string"})):
        tool = Tool("add", {"properties": {"a": {"type": name, "nullable": nullable}}})
        assert ToolSchemas((tool,)).types("add", "a") == types
