"""Tool calls of Solar Open: <|tool_calls|><|tool_call:begin|>a1b2c3d4e5<|tool_call:name|>add<|tool_call:args|>{"a": 1}
<|tool_call:end|><|calls|>, as a separate message if text precedes it."""

import re
import secrets
import string

from quire.services.frontend.output_processor.parsing.call_grammar import (
    CallGrammar,
    Json,
    arguments_schema,
    schema,
    sequence,
)
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.delimited_calls import arguments
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter
from quire.services.frontend.request.request import Tool

BLOCK, BLOCK_END = "<|tool_calls|>", "<|calls|>"
MESSAGE = f"<|begin|>assistant{BLOCK}"
CALL, NAME, ARGUMENTS, CALL_END = "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"
STARTS = (MESSAGE, CALL)
ENDS = Markers(CALL_END, BLOCK_END, CALL)
MARKUP = CallMarkup(
    STARTS, (BLOCK_END,), inner_ends=(CALL_END,), stray_markup=re.compile(f"{re.escape(NAME)}|{re.escape(ARGUMENTS)}")
)
WORD = re.compile(r"[^<>\s]+")
ID_LENGTH = 10
ALPHABET = string.ascii_lowercase + string.digits


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    """Reads text with blocks of calls; the marker of a message may come first if the prompt has not written it."""
    yield from scan.skip_space()
    if (yield from scan.try_text(BLOCK)):
        scan.commit()
    yield from call_blocks(scan, writer, MARKUP, lambda start: _calls(scan, writer, start))


def _calls(scan: Scanner, writer: EventWriter, start: str) -> Steps[None]:
    """Reads the calls with their ids from marker `start` on; the block's end is left for the caller. Raises
    Malformed for a call without a name."""
    if start != CALL:
        yield from scan.skip_space()
        yield from scan.expect(CALL)
    more = CALL
    while more == CALL:
        call_id = yield from scan.read_run(WORD, LONGEST_NAME)
        yield from scan.expect(NAME)
        name = yield from scan.read_run(WORD, LONGEST_NAME)
        yield from scan.expect(ARGUMENTS)
        if not name:
            raise Malformed
        more = yield from arguments(scan, writer, writer.start_call(name, call_id), ENDS)
        if more == BLOCK_END:
            scan.at -= len(BLOCK_END)
        elif more == CALL_END:
            scan.commit()
            yield from scan.skip_space()
            more = yield from scan.try_text(CALL)


def new_id(_index: int, _name: str) -> str:
    return "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH))


def _call_grammar(tool: Tool) -> Json:
    call_id = {"type": "regex", "pattern": f"[a-z0-9]{{{ID_LENGTH}}}"}
    return sequence(CALL, call_id, f"{NAME}{tool.name}{ARGUMENTS}", schema(arguments_schema(tool)), CALL_END)


GRAMMAR = CallGrammar(_call_grammar, before=BLOCK, between="", after=BLOCK_END)
FORMAT = ToolFormat(read, (BLOCK, "<|begin|>", CALL, NAME, ARGUMENTS, CALL_END, BLOCK_END), new_id, (GRAMMAR,), STARTS)
