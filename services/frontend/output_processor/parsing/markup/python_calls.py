"""Calls written as Python does: add(a=1, b="two")."""

from __future__ import annotations

import re
from collections.abc import Callable

from quire.services.frontend.output_processor.parsing.markup.call_blocks import read_call_end, reject_call
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values import python_text
from quire.services.frontend.output_processor.parsing.values.json_text import quoted
from quire.services.frontend.output_processor.parsing.writer import EventWriter

NAME = re.compile(r"[\w.\-]+")

IsName = Callable[[str], bool]


def call(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName) -> Steps[None]:
    """It is a call from its bracket on."""
    name = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.expect("(")
    if not is_name(name):
        raise Malformed
    yield from arguments(scan, writer, schemas, name)


def arguments(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, name: str) -> Steps[None]:
    """Those of a call of `name`, from behind the bracket on. The ones without a name have those of the tool's
    parameters, in order."""
    out = writer.start_call(name)
    out.begin("{")
    unnamed = iter(schemas.parameters(name))
    yield from scan.skip_space()
    while not (yield from scan.try_text(")")):
        key = (yield from _key(scan)) or next(unnamed, "")
        if not key:
            raise Malformed
        out.key(quoted(key))
        yield from python_text.value(scan, out)
        yield from scan.skip_space()
        if not (yield from scan.next_is(")")):
            yield from scan.expect(",")
            yield from scan.skip_space()
    out.end()
    writer.end_call()


def _key(scan: Scanner) -> Steps[str]:
    """Empty, and nothing read, in front of a value without one."""
    begin = scan.at
    key = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.skip_space()
    if key and (yield from scan.try_text("=")):
        yield from scan.skip_space()
        return key
    scan.at = begin
    return ""


def calls(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName) -> Steps[None]:
    """Several, with commas between them."""
    while True:
        yield from scan.skip_space()
        yield from call(scan, writer, schemas, is_name)
        yield from scan.skip_space()
        if not (yield from scan.try_text(",")):
            return


def listed(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName) -> Steps[None]:
    """Several in brackets."""
    yield from scan.skip_space()
    yield from scan.expect("[")
    yield from calls(scan, writer, schemas, is_name)
    yield from scan.expect("]")
    scan.commit()


def listed_first(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName, end: str) -> Steps[None]:
    """Several in brackets at the beginning of an answer, with `end` behind them if there is one; else it was text."""
    before = writer.num_calls
    try:
        yield from listed(scan, writer, schemas, is_name)
    except Malformed:
        reject_call(scan, writer, called=writer.num_calls > before)
    yield from read_call_end(scan, writer, (end,), called=writer.num_calls > before)
