"""Tool calls of Mistral: [TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}] up to the tokenizers of 2024, and since
then [TOOL_CALLS]add[CALL_ID]123456789[ARGS]{"a": 1}, where some omit the id and [ARGS], with one marker per call."""

import re
import secrets
import string

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME, Keys, calls
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values import json_repair
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, ID, ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
MARKUP = CallMarkup((START,), stray_markup=re.compile(f"{re.escape(ID)}|{re.escape(ARGUMENTS)}"))
NAME = re.compile(r"[^\[\]{}\s]+")
ID_LENGTH = 9  # the length that Mistral's templates require
ALPHABET = string.ascii_letters + string.digits


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    return call_blocks(scan, writer, MARKUP, lambda _start: _calls(scan, writer))


def _calls(scan: Scanner, writer: EventWriter) -> Steps[None]:
    """Reads calls in either form after the marker: JSON with names, or a name and its arguments."""
    yield from scan.skip_space()
    if (yield from scan.peek()) in ("[", "{"):
        yield from calls(scan, writer, Keys())
    else:
        yield from _named(scan, writer)


def _named(scan: Scanner, writer: EventWriter) -> Steps[None]:
    """Reads one call with its name, optional id and object of arguments; raises Malformed without name or object."""
    name = yield from scan.read_run(NAME, LONGEST_NAME)
    if not name:
        raise Malformed
    call_id = ""
    yield from scan.skip_space()
    if (yield from scan.try_text(ID)):
        call_id = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.try_text(ARGUMENTS)
    yield from scan.skip_space()
    if (yield from scan.peek()) != "{":
        raise Malformed
    yield from json_repair.value(scan, writer.start_call(name, call_id))
    writer.end_call()


def new_id(_index: int, _name: str) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))


NAMED = CallGrammar(json_arguments(f"{START}NAME{ARGUMENTS}", "", quote=False), between="", needs=ARGUMENTS)
LISTED = CallGrammar(json_arguments('{"name": NAME, "arguments": ', "}"), before=f"{START}[", between=", ", after="]")
FORMAT = ToolFormat(read, (START, ID, ARGUMENTS), new_id, (NAMED, LISTED), (START,))
