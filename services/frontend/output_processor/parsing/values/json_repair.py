"""Reader of JSON as models write it, in pieces, which writes it out as valid JSON.

Repaired are: line breaks and quotation marks in strings, backslashes that escape nothing, Python's literals and quotes,
bare words, missing and trailing commas, wrong brackets, keys without a value. Anything else is Malformed.
"""

from __future__ import annotations

import json
import re

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Sink, Steps
from quire.services.frontend.output_processor.parsing.values import json_text
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.values.json_text import CONTROL, PLAIN, quoted

GAP = re.compile(r"[ \t\r\n,]+")
WORD = re.compile(r"[\w+.\-$]+")
NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
S = r"[ \t\r\n]"
WHOLE = r'"[^"\\\x00-\x1f]*"'  # a string that needs no repair
KEY = re.compile(rf'"([^"\\\x00-\x1f]*)"{S}*:{S}*(?=[^ \t\r\n,}}\]])')
BEGUN_KEY = re.compile(rf'"[^"\\\x00-\x1f]{{0,100}}(?:"{S}{{0,8}}(?::{S}{{0,8}})?)?\Z')
LEAF = re.compile(rf"(?:{WHOLE}|{NUMBER.pattern}|true|false|null)(?={S}*[,}}\]])")
# Text that may follow strings. A quotation mark begins the next key where a comma is missing, or is part of this
# string.
AFTER_VALUE = re.compile(rf"""{S}*[,}}\]<]|{S}+["']""")
BEFORE_COLON = re.compile(rf"{S}*[:<]")
NAMES = {
    "true": "true", "True": "true", "false": "false", "False": "false", "null": "null", "None": "null",
    "undefined": "null", "NaN": "null", "nan": "null", "Infinity": "null", "-Infinity": "null",
}  # fmt: skip
SHORTEST_PREFIX = 3  # shortest prefix of a literal that counts as the literal
LONGEST_WORD = 400
HEX = frozenset("0123456789abcdefABCDEF")


def value(scan: Scanner, out: ArgumentsWriter) -> Steps[None]:
    """Reads one value up to its end and writes it as valid JSON; nested values are handled without recursion."""
    outside = out.depth
    yield from _item(scan, out)
    while out.depth > outside:
        scan.take_run(GAP)
        if not (character := scan.character):
            yield from _wait(scan)
        elif character in "}]":
            scan.at += 1
            out.end_up_to(character)
        elif not out.in_object:
            yield from _item(scan, out)
        elif found := scan.match(KEY):
            out.key(found[1])
        elif scan.matches(BEGUN_KEY) and not scan.has_ended:
            yield
        else:
            yield from _key(scan, out)


def _wait(scan: Scanner) -> Steps[None]:
    if scan.has_ended:
        raise Malformed
    yield


def _key(scan: Scanner, out: ArgumentsWriter) -> Steps[None]:
    """Reads a key, repaired if necessary, up to its value; drops a key without a value."""
    quote = yield from scan.peek()
    if quote in PLAIN:
        parts: list[str] = []
        yield from _string(scan, quote, parts.append, BEFORE_COLON)
        key = "".join(parts)
    else:
        key = quoted((yield from scan.read_run(WORD, LONGEST_WORD)))
    yield from scan.skip_space()
    yield from scan.expect(":")
    yield from scan.skip_space()
    if (yield from scan.peek()) not in (",", "}", "]"):
        out.key(key)


def _item(scan: Scanner, out: ArgumentsWriter) -> Steps[None]:
    """Reads a string or a word, or the opening bracket of an object or a list."""
    while not (first := scan.character):
        yield from _wait(scan)
    if found := scan.match(LEAF):
        out.scalar(found[0])
    elif first in "{[":
        scan.at += 1
        out.open(first)
    elif first in PLAIN:
        yield from _string(scan, first, out.string_part, AFTER_VALUE)
        out.end_string()
    else:
        word = yield from scan.read_run(WORD, LONGEST_WORD)
        if not word or not (yield from scan.peek()):  # the word may be incomplete
            raise Malformed
        out.scalar(scalar(word))


def scalar(word: str) -> str:
    """Converts a word to JSON: a number, a literal, or a string."""
    if NUMBER.fullmatch(word):
        return word
    if word in NAMES:
        return NAMES[word]
    if len(word) >= SHORTEST_PREFIX:
        for literal in ("true", "false", "null"):
            if literal.startswith(word):
                return literal
    try:
        return json.dumps(number(word), allow_nan=False)
    except ValueError:
        return f'"{quoted(word)}"'


def number(word: str) -> int | float:
    """Parses a number, also 0x1f, 1_000, .5 and +1; raises ValueError for other words."""
    try:
        return int(word, 0)
    except ValueError:
        return float(word)


def _string(scan: Scanner, quote: str, sink: Sink, followers: re.Pattern[str]) -> Steps[None]:
    """Reads a string as written, without its quotation marks. A quotation mark not followed by `followers` is part of
    it."""
    scan.at += 1
    plain = PLAIN[quote]
    while True:
        if part := scan.take_run(plain):
            part = CONTROL.sub(lambda found: quoted(found[0]), part)
            sink(part if quote == '"' else part.replace('"', '\\"'))
        elif not (character := scan.character):
            yield from _wait(scan)
        elif character == "\\":
            sink((yield from _escape(scan)))
        else:
            scan.at += 1
            if scan.matches(followers) or (yield from _ends(scan, followers)):
                return
            sink('\\"' if quote == '"' else quote)


def _ends(scan: Scanner, followers: re.Pattern[str]) -> Steps[bool]:
    """Returns whether a string ends here, or with the text; may wait for what follows."""
    begin = scan.at
    yield from scan.skip_space()
    at_end = not (yield from scan.peek())
    scan.at = begin
    return at_end or scan.matches(followers)


def _escape(scan: Scanner) -> Steps[str]:
    """Reads an escape from its backslash. A backslash that escapes nothing is kept."""
    begin = scan.at
    scan.at += 1
    kind = yield from scan.peek()
    scan.at += len(kind)
    if kind in ("", "u"):
        digits = "" if not kind else (yield from _hex_digits(scan))
        if not kind or not (yield from scan.peek()):
            scan.at = begin
            raise Malformed
        return ("\\u" if len(digits) == 4 else "\\\\u") + digits
    if kind == "'":
        return kind
    return ("\\" if kind in json_text.ESCAPED else "\\\\") + (kind if kind >= " " else quoted(kind))


def _hex_digits(scan: Scanner) -> Steps[str]:
    """Reads at most four hexadecimal digits; fewer if another character follows."""
    digits = ""
    while len(digits) < 4 and (character := (yield from scan.peek())) in HEX:
        scan.at += 1
        digits += character
    return digits


def repaired(text: str) -> str:
    """Returns a complete object or list as JSON; empty if it is neither."""
    parts: list[str] = []
    scan = Scanner()
    scan.feed(text)
    scan.end()
    try:
        for _ in value(scan, ArgumentsWriter(parts.append)):
            pass
    except Malformed:
        return ""
    return "".join(parts) if scan.at_end else ""


class IncrementalJson:
    """Reader of an object, bare or within a JSON string, whose text is pushed; the text after it is kept as `rest`."""

    __slots__ = ("_out", "_scan", "_steps", "is_complete", "is_finished")

    def __init__(self, out: ArgumentsWriter) -> None:
        self._scan = Scanner()
        self._out = out
        self._steps = self._read()
        self.is_finished = False  # the object has ended, or the text is not JSON
        self.is_complete = False  # the object has ended

    def push(self, text: str) -> None:
        self._scan.feed(text)
        if not self.is_finished:
            next(self._steps, None)

    def end(self) -> None:
        """Marks the text as complete, so that a word at its end is complete too."""
        if not self._out.in_string:
            self.push("\n")
        self._scan.end()
        next(self._steps, None)

    @property
    def rest(self) -> str:
        """Text after the end that was not read."""
        self._scan.commit()
        return self._scan.take_rest().strip()

    def _read(self) -> Steps[None]:
        """Reads one object, or one within a JSON string; other or malformed text leaves is_complete False."""
        try:
            yield from self._scan.skip_space()
            if (yield from self._scan.next_is(*PLAIN)):
                yield from self._in_string()
            elif (yield from self._scan.next_is("{")):
                yield from value(self._scan, self._out)
                self.is_complete = True
        except Malformed:
            pass
        self.is_finished = True

    def _in_string(self) -> Steps[None]:
        """Reads a JSON string whose content is the JSON to read, as some models quote their arguments."""
        inner = IncrementalJson(self._out)
        yield from json_text.string(self._scan, inner.push)
        inner.end()
        self.is_complete = inner.is_complete
