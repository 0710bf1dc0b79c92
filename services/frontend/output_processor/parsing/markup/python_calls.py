"""Calls in Python syntax: add(a=1, b="two")."""

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
    """Reads one call such as add(a=1) and writes it; raises Malformed unless a name that `is_name` accepts and an
    opening bracket come next."""
    name = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.expect("(")
    if not is_name(name):
        raise Malformed
    yield from arguments(scan, writer, schemas, name)


def arguments(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, name: str) -> Steps[None]:
    """Reads the arguments of a call of `name` from after its bracket. Positional ones get the tool's parameter names in
    order."""
    out = writer.start_call(name)
    out.open("{")
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
    """Reads the name of a keyword argument; empty, and nothing consumed, before a positional one."""
    begin = scan.at
    key = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.skip_space()
    if key and (yield from scan.try_text("=")):
        yield from scan.skip_space()
        return key
    scan.at = begin
    return ""


def calls(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName) -> Steps[None]:
    """Reads one or several calls with commas between them; raises Malformed for anything else."""
    while True:
        yield from scan.skip_space()
        yield from call(scan, writer, schemas, is_name)
        yield from scan.skip_space()
        if not (yield from scan.try_text(",")):
            return


def call_list(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName) -> Steps[None]:
    """Reads several calls in square brackets and commits them; raises Malformed for anything else."""
    yield from scan.skip_space()
    yield from scan.expect("[")
    yield from calls(scan, writer, schemas, is_name)
    yield from scan.expect("]")
    scan.commit()


def leading_call_list(
    scan: Scanner, writer: EventWriter, schemas: ToolSchemas, is_name: IsName, end: str
) -> Steps[None]:
    """Reads several calls in brackets at the beginning of an answer and `end` after them, if any; otherwise it is
    text."""
    before = writer.num_calls
    try:
        yield from call_list(scan, writer, schemas, is_name)
    except Malformed:
        reject_call(scan, writer, called=writer.num_calls > before)
    yield from read_call_end(scan, writer, (end,), called=writer.num_calls > before)
