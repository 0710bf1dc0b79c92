"""Calls written as Python does: add(a=1, b="two")."""

from __future__ import annotations

import re
from collections.abc import Callable

from services.frontend.output_processor.parsing import python_text
from services.frontend.output_processor.parsing.json_calls import LONGEST_NAME, close
from services.frontend.output_processor.parsing.json_text import quoted
from services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from services.frontend.output_processor.parsing.writer import EventWriter

NAME = re.compile(r"[\w.\-]+")


def call(scan: Scanner, writer: EventWriter, is_name: Callable[[str], bool]) -> Steps[None]:
    """Its arguments have names; it is a call from its bracket on."""
    name = yield from scan.whole(NAME, LONGEST_NAME)
    yield from scan.expect("(")
    if not is_name(name):
        raise Malformed
    writer.start(name)
    yield from scan.skip_space()
    separator = "{"
    while not (yield from scan.try_text(")")):
        key = yield from _key(scan)
        writer.arguments(f'{separator}"{quoted(key)}": ')
        separator = ", "
        yield from python_text.value(scan, writer.arguments)
        yield from scan.skip_space()
        if not (yield from scan.comes(")")):
            yield from scan.expect(",")
            yield from scan.skip_space()
    writer.arguments("{}" if separator == "{" else "}")


def _key(scan: Scanner) -> Steps[str]:
    key = yield from scan.whole(NAME, LONGEST_NAME)
    yield from scan.skip_space()
    yield from scan.expect("=")
    yield from scan.skip_space()
    return key


def calls(scan: Scanner, writer: EventWriter, is_name: Callable[[str], bool]) -> Steps[None]:
    """Several, with commas between them."""
    while True:
        yield from scan.skip_space()
        yield from call(scan, writer, is_name)
        yield from scan.skip_space()
        if not (yield from scan.try_text(",")):
            return


def listed(scan: Scanner, writer: EventWriter, is_name: Callable[[str], bool], end: str) -> Steps[None]:
    """Several in brackets, with `end` behind them if there is one; else it was text."""
    before = writer.num_calls
    try:
        yield from scan.skip_space()
        yield from scan.expect("[")
        yield from calls(scan, writer, is_name)
        yield from scan.expect("]")
        scan.settle()
    except Malformed:
        writer.no_markup()
    yield from close(scan, writer, (end,), called=writer.num_calls > before)
