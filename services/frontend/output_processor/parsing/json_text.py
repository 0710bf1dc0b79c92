"""JSON that comes in pieces: values as they are written, strings decoded.

Bad JSON is Malformed at the first character that cannot be; whatever was right before it has been handed out.
"""

from __future__ import annotations

import json
import re

from services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Sink, Steps

PLAIN = re.compile(r'[^"\\]+')  # inside a string
# Between brackets: punctuation, numbers, true, null; and whole strings without anything special in them.
ATOMS = re.compile(r'(?:[ \t\r\n,:0-9A-Za-z+.\-]+|"[^"\\\x00-\x1f]*")+')
SCALAR = re.compile(r"[0-9A-Za-z+.\-]+")
CONTROL = re.compile(r"[\x00-\x1f]")
CLOSING = {"{": "}", "[": "]"}
LONGEST_SCALAR = 400
ESCAPED = frozenset('"\\/bfnrtu')  # what may follow a backslash


def quoted(text: str) -> str:
    """As a JSON string, without its quotation marks. Half a surrogate pair becomes U+FFFD: it has no UTF-8."""
    return json.dumps(text.encode("utf-8", "replace").decode(), ensure_ascii=False)[1:-1]


def value(scan: Scanner, sink: Sink) -> Steps[None]:
    """One value, as it is written; but line breaks and the like inside of strings, and backslashes that escape nothing,
    which JSON forbids and models write, are escaped."""
    first = yield from scan.peek()
    if first == '"':
        yield from _raw_string(scan, sink)
    elif first in CLOSING and first:
        yield from _brackets(scan, sink)
    else:
        sink((yield from scalar(scan)))


def _brackets(scan: Scanner, sink: Sink) -> Steps[None]:
    open_ones: list[str] = []
    while character := (yield from scan.peek()):
        if character in CLOSING:
            scan.at += 1
            open_ones.append(CLOSING[character])
            sink(character)
        elif character == open_ones[-1]:
            scan.at += 1
            open_ones.pop()
            sink(character)
            if not open_ones:
                return
        elif atoms := scan.ready(ATOMS):
            sink(atoms)
        elif character == '"':
            yield from _raw_string(scan, sink)
        else:
            break
    raise Malformed


def _raw_string(scan: Scanner, sink: Sink) -> Steps[None]:
    scan.at += 1
    sink('"')
    while True:
        character = yield from scan.peek()
        if character == '"':
            scan.at += 1
            sink('"')
            return
        if character == "\\":
            yield from _raw_escape(scan, sink)
        elif plain := scan.ready(PLAIN):
            sink(CONTROL.sub(lambda found: quoted(found[0]), plain))
        else:
            raise Malformed


def _raw_escape(scan: Scanner, sink: Sink) -> Steps[None]:
    begin = scan.at
    scan.at += 1
    if not (yield from scan.peek()):
        scan.at = begin
        raise Malformed
    kind = yield from scan.next()
    sink(("\\" if kind in ESCAPED else "\\\\") + (kind if kind >= " " else quoted(kind)))


def scalar(scan: Scanner) -> Steps[str]:
    """A number, true, false or null; Malformed if it is none of these."""
    text = yield from scan.whole(SCALAR, LONGEST_SCALAR)
    try:
        json.loads(text)
    except ValueError:
        raise Malformed from None
    return text


def string(scan: Scanner, sink: Sink) -> Steps[None]:
    """A string, decoded."""
    yield from scan.expect('"')
    while True:
        character = yield from scan.peek()
        if character == '"':
            scan.at += 1
            return
        if character == "\\":
            sink((yield from _escape(scan)))
        elif plain := scan.ready(PLAIN):
            sink(plain)
        else:
            raise Malformed


def short_string(scan: Scanner, at_most: int) -> Steps[str]:
    """A whole string, decoded; Malformed if it has more characters."""
    parts: list[str] = []
    yield from string(scan, scan.keeping(parts, at_most))
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
    written = "\\" + kind
    if kind == "u":
        for _ in range(4):
            written += yield from scan.next()
    try:
        character: str = json.loads(f'"{written}"')
    except ValueError:
        raise Malformed from None
    return character
