"""Incremental reader of Python literals, which writes them as JSON: strings in pieces, other values as a whole."""

from __future__ import annotations

import json
import re

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Sink, Steps
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.values.json_repair import number
from quire.services.frontend.output_processor.parsing.values.json_text import quoted

DEEPEST = 64
LONGEST_SCALAR = 400
SCALAR = re.compile(r"[0-9A-Za-z_+.\-]+")
NAMES = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
QUOTES = ("'", '"')
CLOSING = {"[": "]", "(": ")"}
PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in QUOTES}
ESCAPES = {
    "a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", "0": "\0",
    "\\": "\\", "'": "'", '"': '"', "\n": "",
}  # fmt: skip
ESCAPE_DIGITS = {"x": 2, "u": 4, "U": 8}


def value(scan: Scanner, out: ArgumentsWriter, depth: int = 0) -> Steps[None]:
    """Reads a string, number, name, list, tuple or dictionary; raises Malformed for anything else."""
    first = yield from scan.peek()
    if depth > DEEPEST:
        raise Malformed
    if first in QUOTES:
        yield from _string(scan, out.string_part)
        out.end_string()
    elif first == "{":
        yield from _dictionary(scan, out, depth)
    elif first in CLOSING:
        yield from _list(scan, out, depth)
    else:
        out.scalar((yield from _scalar(scan)))


def _list(scan: Scanner, out: ArgumentsWriter, depth: int) -> Steps[None]:
    """Reads a list or tuple and writes it as a JSON array."""
    end = CLOSING[(yield from scan.next())]
    out.open("[")
    yield from scan.skip_space()
    more = not (yield from scan.try_text(end))
    while more:
        yield from value(scan, out, depth + 1)
        more = yield from _next_item(scan, end)
    out.end()


def _dictionary(scan: Scanner, out: ArgumentsWriter, depth: int) -> Steps[None]:
    """Reads a dictionary and writes it as a JSON object; keys are written as texts."""
    yield from scan.expect("{")
    out.open("{")
    yield from scan.skip_space()
    more = not (yield from scan.try_text("}"))
    while more:
        out.key((yield from _key(scan)))
        yield from scan.skip_space()
        yield from scan.expect(":")
        yield from scan.skip_space()
        yield from value(scan, out, depth + 1)
        more = yield from _next_item(scan, "}")
    out.end()


def _key(scan: Scanner) -> Steps[str]:
    """Reads a dictionary's key as text without quotation marks, since JSON has only string keys."""
    if (yield from scan.peek()) not in QUOTES:
        return (yield from _scalar(scan))
    parts: list[str] = []
    yield from _string(scan, parts.append)
    return "".join(parts)


def _next_item(scan: Scanner, end: str) -> Steps[bool]:
    """Consumes a comma or `end` and returns whether another item follows; a trailing comma is accepted."""
    yield from scan.skip_space()
    if (yield from scan.expect(",", end)) == end:
        return False
    yield from scan.skip_space()
    return not (yield from scan.try_text(end))


def _scalar(scan: Scanner) -> Steps[str]:
    """Reads a scalar; raises Malformed also at the end of the text, where it may be incomplete."""
    begin = scan.at
    text = yield from scan.read_run(SCALAR, LONGEST_SCALAR)
    if not (yield from scan.peek()):
        raise Malformed
    try:
        return NAMES[text] if text in NAMES else json.dumps(number(text), allow_nan=False)
    except ValueError:
        scan.at = begin
        raise Malformed from None


def _string(scan: Scanner, sink: Sink) -> Steps[None]:
    """Reads a Python string and emits its characters escaped for JSON, without quotation marks; raises Malformed at
    its missing end."""
    quote = yield from scan.next()
    while True:
        character = yield from scan.peek()
        if character == quote:
            scan.at += 1
            return
        if character == "\\":
            sink(quoted((yield from _escape(scan))))
        elif plain := scan.take_run(PLAIN[quote]):
            sink(quoted(plain))
        else:
            raise Malformed


def _escape(scan: Scanner) -> Steps[str]:
    """Reads an escape from its backslash; an escape that Python does not know is kept, backslash included."""
    begin = scan.at
    scan.at += 1
    try:
        kind = yield from scan.next()
        digits = ""
        for _ in range(ESCAPE_DIGITS.get(kind, 0)):
            digits += yield from scan.next()
        return chr(int(digits, 16)) if digits else ESCAPES.get(kind, "\\" + kind)
    except (Malformed, ValueError, OverflowError):
        scan.at = begin
        raise Malformed from None
