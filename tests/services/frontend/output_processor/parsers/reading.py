"""Helpers that run formats on texts split into pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from quire.services.frontend.output_processor.answer_parser import AnswerParser, Part, append_part
from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.events import CallStart, Event
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.registry import reasoning_format, tool_format
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.request.request import Tool

TOOLS = (
    Tool(
        "add",
        {
            "type": "object",
            "properties": {
                "a": {"type": "integer"},
                "b": {"type": "string"},
                "c": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "d": {"$ref": "#/$defs/flags"},
            },
            "$defs": {"flags": {"type": "array", "items": {"type": "boolean"}}},
        },
    ),
    Tool("now"),
)


def pieces(text: str, cuts: Iterable[int]) -> list[str]:
    places = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    return [text[begin:end] for begin, end in pairwise(places)]


def calls_in(parser: str, parts: Sequence[str], tools: tuple[Tool, ...] = TOOLS) -> list[Event]:
    found = tool_format(parser)
    return _read(MarkupReader(lambda scan, writer: found.read(scan, writer, ToolSchemas(tools))), parts)


def answer_in(reasoning: str, tools: str, parts: Sequence[str], *, is_open: bool = True) -> list[Part]:
    """Reads an answer with both parsers, one after the other."""
    thoughts, calls, schemas = reasoning_format(reasoning), tool_format(tools), ToolSchemas(TOOLS)
    probe = CallProbe(calls.read, calls.starts, schemas)
    parser = AnswerParser(
        MarkupReader(lambda scan, writer: thoughts.read(scan, writer, is_open, probe)),
        MarkupReader(lambda scan, writer: calls.read(scan, writer, schemas)),
        new_id=lambda number, _name: f"call-{number}",
        most_calls=None,
        wants_reasoning=True,
        probe=probe,
        reasoning_ends=thoughts.ends,
    )
    joined: list[Part] = []
    for part in [part for text in parts for part in parser.push(text)] + parser.finish():
        append_part(joined, part)
    return joined


def reasoning_in(parser: str, parts: Sequence[str], *, is_open: bool = False) -> list[Event]:
    found = reasoning_format(parser)
    return _read(MarkupReader(lambda scan, writer: found.read(scan, writer, is_open, CallProbe())), parts)


def _read(reader: MarkupReader, parts: Sequence[str]) -> list[Event]:
    """Reads the parts and joins the events as a client does."""
    events = [event for part in parts for event in reader.push(part)] + reader.finish()
    joined: list[Event] = []
    for event in events:
        last = joined[-1] if joined else None
        if isinstance(event, CallStart) or type(last) is not type(event):
            joined.append(event)
        else:
            joined[-1] = type(event)(last.text + event.text)
    return joined
