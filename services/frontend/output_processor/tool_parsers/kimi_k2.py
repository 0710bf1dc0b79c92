"""Tool calls of Kimi K2:

<|tool_calls_section_begin|>
<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
<|tool_calls_section_end|>

The text in place of the name is the call's id; templates expect it back, so clients get it.
"""

import re

from quire.services.frontend.output_processor.parsing.call_grammar import (
    CallGrammar,
    Json,
    arguments_schema,
    schema,
    sequence,
)
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup import json_calls
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.delimited_calls import arguments
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME, Keys
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter
from quire.services.frontend.request.request import Tool

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SECTIONS = (SECTION, "<|tool_call_section_begin|>")  # models also write the singular
SECTION_ENDS = (SECTION_END, "<|tool_call_section_end|>")
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ENDED_BY = (CALL_END, *SECTION_ENDS, CALL)
ENDS = Markers(*ENDED_BY)
MARKUP = CallMarkup(
    (*SECTIONS, CALL), SECTION_ENDS, inner_ends=(CALL_END,), stray_markup=re.compile(re.escape(ARGUMENTS))
)
ID = re.compile(r"[^<>\s]+")
PREFIX = "functions."


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda start: _calls(scan, writer, schemas, start))


def _calls(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, start: str) -> Steps[None]:
    """Reads the calls from marker `start` on, a section or one call; the section's end is left for the caller."""
    if start != CALL:
        yield from scan.skip_space()
        yield from scan.expect(CALL)
    marker = CALL
    while marker == CALL:
        marker = yield from _call(scan, writer, schemas)
        if marker == CALL_END:
            scan.commit()
            yield from scan.skip_space()
            marker = yield from scan.try_text(CALL)
        elif marker in SECTION_ENDS:
            scan.at -= len(marker)


def _call(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[str]:
    """Reads a call and returns what ends it. An id without a function's name precedes a complete call in JSON."""
    yield from scan.skip_space()
    call_id = yield from scan.read_run(ID, LONGEST_NAME)
    name = call_id.removeprefix(PREFIX).rpartition(":")[0] or call_id.removeprefix(PREFIX)
    yield from scan.skip_space()
    yield from scan.expect(ARGUMENTS)
    if not name:
        raise Malformed
    if name == call_id and name not in schemas:
        yield from json_calls.calls(scan, writer, Keys(), schemas.__contains__)
        yield from scan.skip_space()
        return (yield from scan.expect(*ENDED_BY)) if (yield from scan.peek()) else ""
    return (yield from arguments(scan, writer, writer.start_call(name, call_id if ":" in call_id else ""), ENDS))


def new_id(index: int, name: str) -> str:
    return f"{PREFIX}{name}:{index}"


def _call_grammar(tool: Tool) -> Json:
    number = {"type": "regex", "pattern": "[0-9]{1,3}"}
    return sequence(f"{CALL}{PREFIX}{tool.name}:", number, ARGUMENTS, schema(arguments_schema(tool)), CALL_END)


GRAMMAR = CallGrammar(_call_grammar, before=SECTION, between="", after=SECTION_END)
FORMAT = ToolFormat(read, (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END), new_id, (GRAMMAR,), MARKUP.starts)
