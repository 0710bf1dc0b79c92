"""Regular expressions with intersection, complement and word boundaries, as deterministic automata (Brzozowski 1964,
Derivatives of regular expressions), and their conversion back to plain regular expressions (state elimination).

An expression is a tuple: its kind, then its parts. Character sets are tuples of ranges with both ends included.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice, pairwise
from typing import Any

Expression = tuple[Any, ...]
Ranges = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
NOTHING: Expression = ("nothing",)
EMPTY: Expression = ("empty",)
ALL: Ranges = ((0, LAST),)
ANY_TEXT: Expression = ("star", ("characters", ALL))
MAX_STATES = 128
MAX_PARTS = 1_000  # per expression; a derivative takes about a microsecond per part
MAX_CLASSES = 48  # character classes
MAX_CHARACTERS = 20_000  # per expression created from an automaton


class TooLarge(Exception):
    """The automaton or the resulting expression exceeds a limit."""


def characters(ranges: Iterable[tuple[int, int]], *, negated: bool = False) -> Expression:
    """Returns an expression for one character in these ranges, or in none of them if `negated`."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = merged[-1][0], max(last, merged[-1][1])
        else:
            merged.append((first, last))
    if negated:
        edges = [-1, *(edge for pair in merged for edge in pair), LAST + 1]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        merged = [(below + 1, above - 1) for below, above in pairs if below + 1 < above]
    return ("characters", tuple(merged)) if merged else NOTHING


def chain(first: Expression, then: Expression) -> Expression:
    """Returns the concatenation of two expressions, simplified and nested to the right."""
    if NOTHING in (first, then):
        return NOTHING
    if first == EMPTY:
        return then
    if then == EMPTY:
        return first
    return chain(first[1], chain(first[2], then)) if first[0] == "chain" else ("chain", first, then)


def either(options: Iterable[Expression]) -> Expression:
    """Returns the union of expressions, simplified; NOTHING for none."""
    found = _flat("either", options) - {NOTHING}
    if ANY_TEXT in found:
        return ANY_TEXT
    return _group("either", found, NOTHING)


def both(parts: Iterable[Expression]) -> Expression:
    """Returns the intersection of expressions."""
    found = _flat("both", parts) - {ANY_TEXT}
    return NOTHING if NOTHING in found else _group("both", found, ANY_TEXT)


def complement(inner: Expression) -> Expression:
    """Returns an expression for every text that `inner` does not match."""
    if inner == NOTHING:
        return ANY_TEXT
    if inner == ANY_TEXT:
        return NOTHING
    return inner[1] if inner[0] == "not" else ("not", inner)


def repeated(inner: Expression, least: int, most: int | None) -> Expression:
    """Returns an expression for `least` to `most` repetitions; None: unbounded."""
    found = EMPTY if most is not None else EMPTY if inner in (EMPTY, NOTHING) else ("star", inner)
    for _ in range((most or least) - least):
        found = either((EMPTY, chain(inner, found)))
    for _ in range(least):
        found = chain(inner, found)
    return found


def _flat(kind: str, parts: Iterable[Expression]) -> set[Expression]:
    return {inner for part in parts for inner in (part[1] if part[0] == kind else (part,))}


def _group(kind: str, found: set[Expression], none: Expression) -> Expression:
    if len(found) < 2:
        return next(iter(found), none)
    return kind, frozenset(found)


def is_word(character: int) -> bool:
    return any(first <= character <= last for first, last in WORD)


def nullable(expression: Expression, before: bool, after: bool) -> bool:  # noqa: PLR0911 - a case each
    """Whether the expression matches the empty text between two characters that are (`before`, `after`) or are not
    word characters."""
    match expression:
        case ("empty",) | ("star", _):
            return True
        case ("chain", first, then):
            return nullable(first, before, after) and nullable(then, before, after)
        case ("either", options):
            return any(nullable(option, before, after) for option in options)
        case ("both", parts):
            return all(nullable(part, before, after) for part in parts)
        case ("not", inner):
            return not nullable(inner, before, after)
        case ("boundary", is_one):
            return (before != after) == bool(is_one)
    return False


def derivative(expression: Expression, character: int, before: bool) -> Expression:  # noqa: PLR0911 - a case each
    """Returns the expression for what may follow `character`, whose predecessor is (`before`) or is not a word
    character."""
    match expression:
        case ("characters", ranges):
            return EMPTY if any(first <= character <= last for first, last in ranges) else NOTHING
        case ("star", inner):
            return chain(derivative(inner, character, before), expression)
        case ("chain", first, then):
            found = chain(derivative(first, character, before), then)
            if nullable(first, before, is_word(character)):
                found = either((found, derivative(then, character, before)))
            return found
        case ("either", options):
            return either(derivative(option, character, before) for option in options)
        case ("both", parts):
            return both(derivative(part, character, before) for part in parts)
        case ("not", inner):
            return complement(derivative(inner, character, before))
    return NOTHING


def plain(expression: Expression) -> str:
    """Returns an anchored regular expression without look-around that matches the same texts; empty if there are
    none. Raises TooLarge for too many states, classes or characters."""
    _check_size(expression)
    classes = _classes(expression)
    if len(classes) > MAX_CLASSES:
        raise TooLarge
    with_words = any(part[0] == "boundary" for part in _parts(expression))
    numbers, rest = {(expression, False): 0}, [(expression, False)]
    edges: dict[tuple[int, int], list[tuple[int, int]]] = {}
    ends: set[int] = set()
    while rest:
        state, before = current = rest.pop()
        if nullable(state, before, after=False):
            ends.add(numbers[current])
        for ranges in classes:
            found = derivative(state, ranges[0][0], before)
            if found == NOTHING:
                continue
            following = found, with_words and is_word(ranges[0][0])
            if following not in numbers:
                if len(numbers) == MAX_STATES:
                    raise TooLarge
                _check_size(found)
                numbers[following] = len(numbers)
                rest.append(following)
            edges.setdefault((numbers[current], numbers[following]), []).extend(ranges)
    return _eliminated({pair: _written(ranges) for pair, ranges in edges.items()}, ends, len(numbers))


def _check_size(expression: Expression) -> None:
    if next(islice(_parts(expression), MAX_PARTS, None), None) is not None:
        raise TooLarge


def _parts(expression: Expression) -> Iterator[Expression]:
    """Yields an expression and all expressions inside it, repeated ones as often as they occur."""
    rest: list[Any] = [expression]
    while rest:
        part = rest.pop()
        yield part
        for inner in part[1:]:
            if isinstance(inner, frozenset):
                rest += inner
            elif isinstance(inner, tuple) and inner and isinstance(inner[0], str):
                rest.append(inner)


def _classes(expression: Expression) -> list[Ranges]:
    """Partitions the characters into sets that the expression does not distinguish."""
    sets = {part[1] for part in _parts(expression) if part[0] == "characters"} | {WORD}
    edges = sorted({0, LAST + 1, *(edge for ranges in sets for first, last in ranges for edge in (first, last + 1))})
    found: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for first, following in pairwise(edges):
        signature = tuple(any(low <= first <= high for low, high in ranges) for ranges in sets)
        found.setdefault(signature, []).append((first, following - 1))
    return [tuple(ranges) for ranges in found.values()]


def _written(ranges: Iterable[tuple[int, int]]) -> str:
    """Returns a character class of a regular expression for these ranges (both ends included), as hexadecimal
    escapes."""
    found = characters(ranges)[1]
    inside = "".join(
        rf"\x{{{first:X}}}-\x{{{last:X}}}" if first < last else rf"\x{{{first:X}}}" for first, last in found
    )
    return f"[{inside}]"


def _eliminated(edges: dict[tuple[int, int], str], ends: set[int], num_states: int) -> str:
    """Returns the anchored regular expression of an automaton with start state 0; empty if no end is reachable.
    Eliminates states one by one, those with the fewest paths through them first. Raises TooLarge."""
    begin, end = -1, -2
    edges[begin, 0] = ""
    edges.update(((state, end), "") for state in ends)
    left = set(range(num_states))
    while left:
        sources = {state: [s for s, t in edges if t == state and s != state] for state in left}
        targets = {state: [t for s, t in edges if s == state and t != state] for state in left}
        state = min(left, key=lambda one: (len(sources[one]) * len(targets[one]), one))
        loop = edges.get((state, state))
        middle = "" if loop is None else f"(?:{loop})*"
        for source in sources[state]:
            for target in targets[state]:
                way = f"{_grouped(edges[source, state])}{middle}{_grouped(edges[state, target])}"
                known = edges.get((source, target))
                edges[source, target] = way if known is None else f"{known}|{way}"
                if len(edges[source, target]) > MAX_CHARACTERS:
                    raise TooLarge
        edges = {pair: text for pair, text in edges.items() if state not in pair}
        left.remove(state)
    found = edges.get((begin, end))
    return "" if found is None else f"^(?:{found})$"


def _grouped(text: str) -> str:
    return f"(?:{text})" if "|" in text else text
