r"""Parses grammars written as `name ::= alternatives` (the form that GBNF and XGrammar share).

Elements: "text", [characters], [^characters], `.`, names, (groups); after any of them *, +, ?, {n}, {n,} or {n,m};
comments from # to the end of a line. Escapes: \
 \\r \\t \\" \\' \\\\ \\] \\[ \\- \\^ \\xHH \\uHHHH \\UHHHHHHHH.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from quire.shared.errors import InvalidArgument
from quire.shared.structured_output.checks import MAX_NESTING, refuse

TOKEN = re.compile(
    r"""
    (?P<space>[ \t\r\n]+|\#[^\n]*)
  | (?P<define>::=)
  | (?P<name>[A-Za-z_][\w-]*)
  | (?P<text>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
  | (?P<characters>\[\^?(?:[^\]\\\n]|\\.)*\])
  | (?P<count>\{\s*\d+\s*(?:,\s*\d*\s*)?\})
  | (?P<mark>[|()*+?.])
    """,
    re.VERBOSE,
)
ESCAPES = {"n": "\n", "r": "\r", "t": "\t", **{c: c for c in "\"'\\[]-^/"}}
HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
MAX_REPEAT = 10_000


@dataclass(frozen=True, slots=True)
class EbnfText:
    """A literal text."""

    value: str


@dataclass(frozen=True, slots=True)
class Characters:
    """One character of some ranges (both ends included), or, if `negated`, of none of them."""

    ranges: tuple[tuple[int, int], ...]
    negated: bool


@dataclass(frozen=True, slots=True)
class Name:
    """Reference to a rule."""

    value: str


@dataclass(frozen=True, slots=True)
class EbnfSequence:
    """Concatenation of items; empty: the empty text."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class EbnfChoice:
    """Matches any one of several alternatives."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repetition `least` to `most` times; None: unbounded."""

    item: Node
    least: int
    most: int | None


Node = EbnfText | Characters | Name | EbnfSequence | EbnfChoice | Repeat

ANY_CHARACTER = Characters(((10, 10),), negated=True)  # like `.` of a regular expression


@dataclass(frozen=True, slots=True)
class _Token:
    """Token of a grammar, with its line from 1; `kind` is the name of the TOKEN group that matched, or "end"."""

    kind: str
    text: str
    line: int


def rules(text: str) -> dict[str, Node]:
    """Returns rules by name, in order. Raises InvalidArgument naming the line."""
    parser = _Parser(_tokens(text))
    found: dict[str, Node] = {}
    while not parser.at_end:
        line, name, body = parser.rule()
        if name in found:
            raise error(line, f"{name} is defined twice")
        found[name] = body
    return found


def error(line: int, text: str) -> InvalidArgument:
    return refuse(f"grammar, line {line}: {text}")


def _tokens(text: str) -> list[_Token]:
    """Splits a grammar into tokens, without spaces and comments. Raises InvalidArgument, naming the line, for text
    that is no token."""
    tokens = []
    at, line = 0, 1
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise error(line, f"is invalid from {text[at : at + 20]!r} on")
        if match.lastgroup != "space":
            tokens.append(_Token(str(match.lastgroup), match.group(), line))
        line += match.group().count("\n")
        at = match.end()
    return tokens


class _Parser:
    """Recursive-descent parser; a name followed by `::=` begins the next rule."""

    def __init__(self, tokens: list[_Token]) -> None:
        self._tokens = [*tokens, _Token("end", "the end", tokens[-1].line if tokens else 1)]
        self._at = 0
        self._depth = 0

    @property
    def at_end(self) -> bool:
        return self._peek().kind == "end"

    def rule(self) -> tuple[int, str, Node]:
        """Parses one rule; returns its line, name and body. Raises InvalidArgument for a token out of place."""
        name = self._take("name")
        self._take("define")
        body = self._choice()
        if not (self.at_end or self._begins_rule()):
            token = self._peek()
            raise error(token.line, f"{token.text} is not expected at this place")
        return name.line, name.text, body

    def _choice(self) -> Node:
        """Parses alternatives separated by |. Raises InvalidArgument beyond MAX_NESTING levels of groups."""
        self._depth += 1
        if self._depth > MAX_NESTING:
            raise error(self._peek().line, f"groups are nested more than {MAX_NESTING} levels deep")
        options = [self._sequence()]
        while self._peek().text == "|":
            self._at += 1
            options.append(self._sequence())
        self._depth -= 1
        return options[0] if len(options) == 1 else EbnfChoice(tuple(options))

    def _sequence(self) -> Node:
        """Parses items up to a token that begins none; no item at all is the empty text."""
        items: list[Node] = []
        while (item := self._item()) is not None:
            items.append(item)
        return items[0] if len(items) == 1 else EbnfSequence(tuple(items))

    def _item(self) -> Node | None:
        """Parses an element and the repetitions after it; None if no element follows."""
        node = self._element()
        while node is not None and (bounds := self._bounds()) is not None:
            node = Repeat(node, *bounds)
        return node

    def _element(self) -> Node | None:
        """Parses a text, class, name or group; None if the next token is none of these or begins the next rule."""
        token = self._peek()
        if token.kind == "name" and self._begins_rule():
            return None
        if token.text == "(":
            self._at += 1
            inside = self._choice()
            self._take("mark", ")")
            return inside
        node = _leaf(token)
        self._at += node is not None
        return node

    def _bounds(self) -> tuple[int, int | None] | None:
        """Parses a repetition such as * or {2,5}: (least, most), most None: unbounded; None if none follows. Raises
        InvalidArgument for bounds beyond MAX_REPEAT or in the wrong order."""
        token = self._peek()
        simple: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        bounds = simple.get(token.text) if token.kind == "mark" else None
        if token.kind == "count":
            numbers = [part.strip() for part in token.text[1:-1].split(",")]
            most = int(numbers[-1]) if numbers[-1] else None
            bounds = int(numbers[0]), most
            if max(int(numbers[0]), most or 0) > MAX_REPEAT or (most is not None and most < bounds[0]):
                raise error(token.line, f"{token.text} is not a valid repetition of at most {MAX_REPEAT}")
        self._at += bounds is not None
        return bounds

    def _begins_rule(self) -> bool:
        return self._peek().kind == "name" and self._tokens[self._at + 1].kind == "define"

    def _peek(self) -> _Token:
        return self._tokens[self._at]

    def _take(self, kind: str, text: str = "") -> _Token:
        """Returns the next token and advances. Raises InvalidArgument unless it has this kind and, if given, this
        text."""
        token = self._peek()
        if token.kind != kind or (text and token.text != text):
            raise error(token.line, f"{text or {'define': '::='}.get(kind, kind)} is due, not {token.text}")
        self._at += 1
        return token


def _leaf(token: _Token) -> Node | None:
    """Returns the node of a token that stands for itself: a name, text, class or dot; None for any other."""
    match token.kind:
        case "name":
            return Name(token.text)
        case "text":
            return EbnfText("".join(chr(code) for code, _ in _characters(token.text[1:-1], token.line)))
        case "characters":
            return _class(token)
        case "mark" if token.text == ".":
            return ANY_CHARACTER
    return None


def _class(token: _Token) -> Characters:
    """Returns the character class of a token. Raises InvalidArgument for a range that runs backwards and for an
    empty class."""
    inside = token.text[1:-1]
    negated = inside.startswith("^")
    characters = _characters(inside.removeprefix("^"), token.line)
    ranges: list[tuple[int, int]] = []
    at = 0
    while at < len(characters):
        first = last = characters[at][0]
        if at + 2 < len(characters) and characters[at + 1] == (ord("-"), False):
            last = characters[at + 2][0]
            at += 2
        if last < first:
            raise error(token.line, f"{token.text} contains a range whose end precedes its start")
        ranges.append((first, last))
        at += 1
    if not ranges:
        raise error(token.line, f"{token.text} contains no character")
    return Characters(tuple(ranges), negated)


def _characters(text: str, line: int) -> list[tuple[int, bool]]:
    """Returns the code points of a text without its quotes or brackets, escapes resolved, and whether each was
    escaped. Raises InvalidArgument for a wrong escape."""
    found = []
    at = 0
    while at < len(text):
        if text[at] != "\\":
            found.append((ord(text[at]), False))
            at += 1
            continue
        letter = text[at + 1]
        digits = text[at + 2 : at + 2 + HEX_DIGITS.get(letter, 0)]
        found.append((_escaped(letter, digits, line), True))
        at += 2 + len(digits)
    return found


def _escaped(letter: str, digits: str, line: int) -> int:
    """Returns the code point of an escape sequence. `digits`: its hexadecimal digits, if it has any. Raises
    InvalidArgument for an unknown or incomplete one."""
    if letter in ESCAPES:
        return ord(ESCAPES[letter])
    try:
        code = int(digits, 16) if len(digits) == HEX_DIGITS[letter] else -1
        chr(code)
    except (KeyError, ValueError):
        raise error(line, f"\\{letter}{digits} is not a valid escape sequence") from None
    return code
