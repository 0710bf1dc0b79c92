"""Kimi K2:

<|tool_calls_section_begin|>
<|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>
<|tool_calls_section_end|>

What stands for the name is the call's id; templates want to see it again, so clients get it.
"""

import re

from services.frontend.output_processor.parsing.delimited_calls import arguments, blocks
from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import LONGEST_NAME
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.wording import Json, Wording, arguments_schema, schema, sequence
from services.frontend.output_processor.parsing.writer import EventWriter
from services.frontend.request.request import Tool

SECTION, SECTION_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
SECTIONS = (SECTION, "<|tool_call_section_begin|>")  # models also write the singular
SECTION_ENDS = (SECTION_END, "<|tool_call_section_end|>")
CALL, ARGUMENTS, CALL_END = "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"
ENDS = Markers(CALL_END, *SECTION_ENDS, CALL)
ID = re.compile(r"[^<>\s]+")
PREFIX = "functions."


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    return blocks(scan, writer, starts=SECTIONS, call=CALL, ends=SECTION_ENDS, calls=_calls)


def _calls(scan: Scanner, writer: EventWriter) -> Steps[None]:
    found = CALL
    while found == CALL:
        yield from scan.skip_space()
        call_id = yield from scan.whole(ID, LONGEST_NAME)
        name = call_id.removeprefix(PREFIX).rpartition(":")[0] or call_id.removeprefix(PREFIX)
        yield from scan.skip_space()
        yield from scan.expect(ARGUMENTS)
        if not name:
            raise Malformed
        writer.start(name, call_id if ":" in call_id else "")
        found = yield from arguments(scan, writer, ENDS)
        if found == CALL_END:
            scan.settle()
            yield from scan.skip_space()
            found = yield from scan.try_text(CALL)
        elif found in SECTION_ENDS:
            scan.at -= len(found)


def new_id(index: int, name: str) -> str:
    return f"{PREFIX}{name}:{index}"


def _worded(tool: Tool) -> Json:
    number = {"type": "regex", "pattern": "[0-9]{1,3}"}
    return sequence(f"{CALL}{PREFIX}{tool.name}:", number, ARGUMENTS, schema(arguments_schema(tool)), CALL_END)


WORDING = Wording(_worded, before=SECTION, between="", after=SECTION_END)
FORMAT = ToolFormat(read, (SECTION, SECTION_END, CALL, ARGUMENTS, CALL_END), new_id, (WORDING,), (*SECTIONS, CALL))
