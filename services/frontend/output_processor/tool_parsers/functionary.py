"""Tool calls of Functionary 3.1: <function=add>{"a": 1}</function>, and <|python_tag|> before code for a tool named
python; 3.2
writes messages to recipients, the first >>> of which ends the prompt:

>>>all
Let me see.>>>add
{"a": 1}
"""

from __future__ import annotations

import re

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks, reject_call
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values import json_repair
from quire.services.frontend.output_processor.parsing.values.json_text import quoted
from quire.services.frontend.output_processor.parsing.writer import EventWriter

FUNCTION, FUNCTION_END, PYTHON_TAG = "<function=", "</function>", "<|python_tag|>"
MARKUP = CallMarkup((FUNCTION, PYTHON_TAG), (FUNCTION_END,))
RECIPIENT, EVERYONE = ">>>", "all"
RECIPIENTS = Markers(RECIPIENT)
NAME = re.compile(r"[^<>{}\s]+")
INTERPRETER, CODE = "python", "code"  # the tool whose calls are not JSON, and its parameter if it declares none


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda start: _call(scan, writer, schemas, start))


def _call(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, start: str) -> Steps[None]:
    """Reads a call of 3.1 after its marker: code for the tool python, or a name and its arguments."""
    if start == PYTHON_TAG:
        yield from _arguments(scan, writer, schemas, INTERPRETER)
        return
    name = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.expect(">")
    yield from scan.skip_space()
    if not name:
        raise Malformed
    yield from _arguments(scan, writer, schemas, name)


def read_recipients(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads messages to recipients. Many answers contain `>>>`: only those followed by a recipient begin a message."""
    yield from scan.skip_space()
    yield from scan.try_text(RECIPIENT)
    while True:
        try:
            yield from _message(scan, writer, schemas)
        except Malformed:
            reject_call(scan, writer)
        if not (yield from scan.read_until(RECIPIENTS, writer.content)):
            return


def _message(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads a message of 3.2; raises Malformed unless its recipient is `all`, whose text follows, or a tool of the
    request."""
    name = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.expect("\n")
    if name not in (EVERYONE, *schemas.names):
        raise Malformed
    if name != EVERYONE:
        yield from scan.skip_space()
        yield from _arguments(scan, writer, schemas, name)
        yield from scan.skip_space()
    scan.commit()


def _arguments(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, name: str) -> Steps[None]:
    """Reads a JSON object, or the interpreter's code up to the end of the text."""
    if name == INTERPRETER and not (yield from scan.next_is("{")):
        out = writer.start_call(name)
        out.open("{")
        out.key(quoted(next(iter(schemas.parameters(name)), CODE)))
        while (yield from scan.peek()):
            out.string_part(quoted(scan.take_rest()))
        out.end_string()
        out.end()
    elif (yield from scan.next_is("{")):
        yield from json_repair.value(scan, writer.start_call(name))
    else:
        raise Malformed
    writer.end_call()


TAGGED = CallGrammar(json_arguments(f"{FUNCTION}NAME>", FUNCTION_END, quote=False), between="")
ADDRESSED = CallGrammar(json_arguments("NAME\n", "", quote=False), between=RECIPIENT)
FORMAT = ToolFormat(read, (FUNCTION, PYTHON_TAG), grammars=(TAGGED,), starts=MARKUP.starts)
V32 = ToolFormat(read_recipients, (), grammars=(ADDRESSED,), frames_text=True)
