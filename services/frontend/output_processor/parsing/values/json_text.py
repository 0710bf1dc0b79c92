"""Strings of JSON that comes in pieces, decoded. What is none is Malformed at the first character that cannot be."""

from __future__ import annotations

import json
import re

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Sink, Steps

PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}  # inside a string
CONTROL = re.compile(r"[\x00-\x1f]")
ESCAPED = frozenset('"\\/bfnrtu')  # what may follow a backslash


def quoted(text: str) -> str:
    """As a JSON string, without its quotation marks. Half a surrogate pair becomes U+FFFD: it has no UTF-8."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1]


def string(scan: Scanner, sink: Sink) -> Steps[None]:
    """A string, decoded; Python's quotation marks will do."""
    quote = yield from scan.expect(*PLAIN)
    while True:
        character = yield from scan.peek()
        if character == quote:
            scan.at += 1
            return
        if character == "\\":
            sink((yield from _escape(scan)))
        elif plain := scan.take_run(PLAIN[quote]):
            sink(plain)
        else:
            raise Malformed


def short_string(scan: Scanner, at_most: int) -> Steps[str]:
    """A whole string, decoded; Malformed if it has more characters."""
    parts: list[str] = []
    yield from string(scan, scan.bounded_sink(parts, at_most))
    return "".join(parts)


def _escape(scan: Scanner) -> Steps[str]:
    """From the backslash on; both halves of a surrogate pair."""
    written = yield from _one_escape(scan)
    if 0xD800 <= ord(written) < 0xDC00 and (yield from scan.peek()) == "\\":
        begin = scan.at
        low = yield from _one_escape(scan)
        if 0xDC00 <= ord(low) < 0xE000:
            return (written + low).encode("utf-16", "surrogatepass").decode("utf-16")
        scan.at = begin
    return written.encode("utf-8", "replace").decode()


def _one_escape(scan: Scanner) -> Steps[str]:
    scan.at += 1
    kind = yield from scan.next()
    if kind == "'":
        return kind
    written = "\\" + kind
    if kind == "u":
        for _ in range(4):
            written += yield from scan.next()
    try:
        character: str = json.loads(f'"{written}"')
    except ValueError:
        raise Malformed from None
    return character
