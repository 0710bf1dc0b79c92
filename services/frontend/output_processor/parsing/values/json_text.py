"""Incremental reader of JSON strings, which decodes them and raises Malformed at the first invalid character."""

from __future__ import annotations

import json
import re

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Sink, Steps

PLAIN = {quote: re.compile(rf"[^\\{quote}]+") for quote in "\"'"}  # inside a string
CONTROL = re.compile(r"[\x00-\x1f]")
ESCAPED = frozenset('"\\/bfnrtu')  # characters that may follow a backslash


def quoted(text: str) -> str:
    """Escapes text for a JSON string, without quotation marks. A lone surrogate becomes U+FFFD: it has no UTF-8
    encoding."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1]


def string(scan: Scanner, sink: Sink) -> Steps[None]:
    """Reads a string, in double or single quotation marks, and sends its decoded text to the sink; raises Malformed
    for an invalid one."""
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
    """Reads and decodes a whole string; raises Malformed if it is longer than `at_most` characters."""
    parts: list[str] = []
    yield from string(scan, scan.bounded_sink(parts, at_most))
    return "".join(parts)


def _escape(scan: Scanner) -> Steps[str]:
    """Reads an escape from its backslash on, or both of a surrogate pair; a lone surrogate becomes a question mark."""
    written = yield from _one_escape(scan)
    if 0xD800 <= ord(written) < 0xDC00 and (yield from scan.peek()) == "\\":
        begin = scan.at
        low = yield from _one_escape(scan)
        if 0xDC00 <= ord(low) < 0xE000:
            return (written + low).encode("utf-16", "surrogatepass").decode("utf-16")
        scan.at = begin
    return written.encode("utf-8", "replace").decode()


def _one_escape(scan: Scanner) -> Steps[str]:
    """Reads one escape, an escaped apostrophe included, and returns its character; raises Malformed for an invalid
    one."""
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
