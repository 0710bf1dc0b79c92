r"""Rewrites regular expressions with look-ahead or word boundaries as plain ones, which every grammar library supports.

Look-ahead at the beginning becomes additional expressions that the text must match as well: `^(?!\\.)(?=.*@)x` is
three; anywhere else the whole expression is converted to an automaton.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from quire.shared.structured_output import automaton
from quire.shared.structured_output.automaton import ANY_TEXT, EMPTY, NOTHING, WORD, Expression
from quire.shared.structured_output.checks import refuse

# Python's own parser; JavaScript's syntax is largely the same.
_syntax: Any = importlib.import_module("re._parser")
LOOKS = re.compile(r"(?<!\\)(?:\\\\)*(?:\(\?<?[=!]|\\[bB])")
NAMED_GROUP = re.compile(r"\(\?<(?=[A-Za-z_])")
CATEGORIES = {"DIGIT": ((48, 57),), "WORD": WORD, "SPACE": ((9, 13), (32, 32), (160, 160), (0x2028, 0x2029))}
MAX_REPEAT = 100
REMEMBERED = 256


class Unreadable(Exception):
    """The expression uses a construct that cannot be rewritten."""


@lru_cache(REMEMBERED)
def plain_patterns(pattern: str) -> tuple[str, ...]:
    """Returns JSON Schema patterns that together are equivalent to `pattern`; the pattern itself if it has no
    look-around. Raises InvalidArgument for look-around that cannot be expressed without it, and for patterns that no
    text satisfies."""
    if not LOOKS.search(pattern):
        return (pattern,)
    try:
        found = tuple(_plain(NAMED_GROUP.sub("(?P<", pattern)))
    except (Unreadable, automaton.TooLarge, re.error, RecursionError) as error:
        reason = str(error) or "the equivalent pattern without it is too large"
        raise refuse(f"look-around in {pattern[:100]!r} is not supported in this pattern: {reason}") from None
    if "" in found:
        raise refuse(f"no text satisfies the pattern {pattern[:100]!r}")
    return found


def _plain(pattern: str) -> list[str]:
    """Returns plain patterns that together match the same texts: one for each look-ahead at the beginning, and one
    for the rest. Raises Unreadable or TooLarge."""
    text, written = pattern.removeprefix("^"), list[str]()
    while pattern.startswith("^") and text.startswith(("(?=", "(?!")):
        inside, text = _first_group(text)
        looked = _expression([*_syntax.parse(inside[3:])], ANY_TEXT)
        written.append(automaton.plain(looked if inside[2] == "=" else automaton.complement(looked)))
    if not written or has_alternatives(text):
        return [automaton.plain(_searched(pattern))]
    rest = f"^{text}"
    return [*written, automaton.plain(_searched(rest)) if LOOKS.search(rest) else rest]


def _searched(pattern: str) -> Expression:
    """Returns the expression for texts that contain a match of `pattern`, as JSON Schema uses patterns; anchored at
    the beginning if it starts with ^."""
    tree = [*_syntax.parse(pattern)]
    if tree and tree[0] == (_syntax.AT, _syntax.AT_BEGINNING):
        return _expression(tree[1:], ANY_TEXT)
    return automaton.chain(ANY_TEXT, _expression(tree, ANY_TEXT))


def _first_group(text: str) -> tuple[str, str]:
    """Splits a text that begins with a group: returns the group without its closing parenthesis, and the text after
    it. Raises Unreadable if the group has no end."""
    for at, depth in _depths(text):
        if depth == 0:
            return text[:at], text[at + 1 :]
    raise Unreadable("a group is not closed")


def has_alternatives(text: str) -> bool:
    """Whether the expression has alternatives outside of all groups."""
    return any(depth == 0 and text[at] == "|" for at, depth in _depths(text))


def _depths(text: str) -> Iterator[tuple[int, int]]:
    """Yields positions outside of character classes, each with the group depth after it."""
    depth, at, in_class = 0, 0, False
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        else:
            depth += (character == "(") - (character == ")")
            yield at, depth
        at += 1


def _expression(tree: list[Any], then: Expression) -> Expression:
    """Returns the expression of a parsed tree followed by `then`: a look-ahead constrains both."""
    for operation, value in reversed(tree):
        then = _rewrite_operation(str(operation), value, then)
    return then


def _rewrite_operation(operation: str, value: Any, then: Expression) -> Expression:  # noqa: PLR0911 - a case each
    """Returns the expression of one operation of the parsed tree (Python's re parser) followed by `then`. Raises
    Unreadable for an operation that cannot be rewritten, such as a back-reference."""
    match operation:
        case "LITERAL":
            return automaton.chain(automaton.characters([(value, value)]), then)
        case "NOT_LITERAL":
            return automaton.chain(automaton.characters([(value, value)], negated=True), then)
        case "ANY":
            return automaton.chain(automaton.characters([(10, 10), (13, 13)], negated=True), then)
        case "IN":
            return automaton.chain(_class(value), then)
        case "BRANCH":
            return automaton.either(_expression([*branch], then) for branch in value[1])
        case "SUBPATTERN" if not value[1] and not value[2]:
            return _expression([*value[3]], then)
        case "MAX_REPEAT" | "MIN_REPEAT":
            least, most, body = value
            return _repeat(least, most, body, then)
        case "AT" if value == _syntax.AT_END:
            return EMPTY if automaton.nullable(then, before=False, after=False) else NOTHING
        case "AT" if value in (_syntax.AT_BOUNDARY, _syntax.AT_NON_BOUNDARY):
            return automaton.chain(("boundary", value == _syntax.AT_BOUNDARY), then)
        case "ASSERT" | "ASSERT_NOT" if value[0] == 1:
            looked = _expression([*value[1]], ANY_TEXT)
            return automaton.both((looked if operation == "ASSERT" else automaton.complement(looked), then))
    raise Unreadable(f"{operation.lower()} cannot be combined with it")


def _class(items: list[Any]) -> Expression:
    """Returns the expression of a character class: its literals, ranges and categories, negated if it says so."""
    ranges: list[tuple[int, int]] = []
    negated = False
    for operation, value in items:
        match str(operation):
            case "NEGATE":
                negated = True
            case "LITERAL":
                ranges.append((value, value))
            case "RANGE":
                ranges.append(value)
            case _:
                ranges += _category(str(value).removeprefix("CATEGORY_"))
    return automaton.characters(ranges, negated=negated)


def _category(name: str) -> automaton.Ranges:
    """Returns the character ranges of a category such as DIGIT or NOT_WORD."""
    found: automaton.Ranges = automaton.characters(
        CATEGORIES[name.removeprefix("NOT_")], negated=name.startswith("NOT_")
    )[1]
    return found


def _repeat(least: int, most: Any, body: Any, then: Expression) -> Expression:
    """Returns `least` to `most` repetitions of `body` followed by `then`. Raises Unreadable for more than
    MAX_REPEAT, and for look-ahead inside of a repetition other than `?`."""
    endless = most == _syntax.MAXREPEAT
    if least > MAX_REPEAT or (not endless and most > MAX_REPEAT):
        raise Unreadable(f"more than {MAX_REPEAT} repetitions cannot be combined with it")
    if (least, most) == (0, 1):
        return automaton.either((then, _expression([*body], then)))
    if _looks_ahead(body):
        raise Unreadable("look-ahead inside a repetition is not supported")
    inner = _expression([*body], EMPTY)
    return automaton.chain(automaton.repeated(inner, least, None if endless else most), then)


def _looks_ahead(tree: Any) -> bool:
    return any(word in str(tree) for word in ("ASSERT", "AT_END"))
