"""Converts EBNF grammars to Lark.

Rules that cannot reach themselves become terminals, which are matched as regular expressions: exactly, and fast. The
remaining rules consist of terminals, for which the longest match counts, as in every Lark grammar.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from quire.shared.structured_output.checks import refuse
from quire.shared.structured_output.ebnf_syntax import (
    Characters,
    EbnfChoice,
    EbnfSequence,
    EbnfText,
    Name,
    Node,
    Repeat,
    rules,
)

ROOT = "root"
DEFINITION = re.compile(r"^\s*[A-Za-z_][\w-]*\s*::=", re.MULTILINE)


def is_ebnf(text: str) -> bool:
    """Whether a grammar is in EBNF; Lark writes `name: alternatives`."""
    return DEFINITION.search(text) is not None


def lark(text: str) -> str:
    """Returns the grammar in Lark, with a start rule for ROOT. Raises InvalidArgument for a syntax error, an
    undefined name, or a missing root."""
    bodies = rules(text)
    if ROOT not in bodies:
        raise refuse(f"grammar: a rule named {ROOT} is required")
    for body in bodies.values():
        for name in _names(body):
            if name not in bodies:
                raise refuse(f"grammar: {name} is not defined")
    return _Writer(bodies).write()


class _Writer:
    """Writes the grammar with new names: Lark distinguishes rules and terminals by case."""

    def __init__(self, bodies: dict[str, Node]) -> None:
        self._bodies = bodies
        self._recursive = _recursive(bodies)
        self._written = {
            name: f"r{number}" if name in self._recursive else f"T{number}" for number, name in enumerate(bodies)
        }
        self._terminals: list[str] = []  # for runs of regular items inside rules

    def write(self) -> str:
        """Returns the complete grammar: start rule, one rule or terminal for each rule of the source, and the
        terminals made of their parts."""
        lines = [f"start: {self._written[ROOT]}"]
        for name, body in self._bodies.items():
            written = self._rule(body) if name in self._recursive else self._regular(body)
            lines.append(f"{self._written[name]}: {written}")
        return "\n".join([*lines, *self._terminals]) + "\n"

    def _is_regular(self, node: Node) -> bool:
        return self._recursive.isdisjoint(_names(node))

    def _rule(self, node: Node) -> str:
        """Returns a node as part of a Lark rule; regular parts become terminals."""
        if self._is_regular(node):
            return self._terminal(node)
        match node:
            case Name(value):
                return self._written[value]
            case EbnfSequence(items):
                return " ".join(self._run(items))
            case EbnfChoice(options):
                return f"({' | '.join(self._rule(option) for option in options)})"
            case Repeat(item, least, most):
                return f"({self._rule(item)}){_bounds(least, most)}"
        raise AssertionError(f"{node} is regular")

    def _run(self, items: tuple[Node, ...]) -> Iterator[str]:
        """Yields the items of a sequence; adjacent regular items are combined into one terminal."""
        regular: list[Node] = []
        for item in items:
            if self._is_regular(item):
                regular.append(item)
                continue
            if regular:
                yield self._terminal(EbnfSequence(tuple(regular)))
                regular = []
            yield self._rule(item)
        if regular:
            yield self._terminal(EbnfSequence(tuple(regular)))

    def _terminal(self, node: Node) -> str:
        """Writes a regular node as part of a rule; adds a terminal for it unless it is a single text, class or name."""
        written = self._regular(node)
        if isinstance(node, EbnfText | Characters | Name) or not written:
            return written
        name = f"R{len(self._terminals)}"
        self._terminals.append(f"{name}: {written}")
        return name

    def _regular(self, node: Node) -> str:
        """Returns a regular node as part of a Lark terminal, with names replaced by those of their terminals."""
        match node:
            case EbnfText(value):
                return json.dumps(value, ensure_ascii=False)
            case Characters(ranges, negated):
                inside = "".join(rf"\x{{{first:X}}}-\x{{{last:X}}}" for first, last in ranges)
                return f"/[{'^' if negated else ''}{inside}]/"
            case Name(value):
                return self._written[value]
            case EbnfSequence(items):
                return f"({' '.join(self._regular(item) for item in items)})" if items else '""'
            case EbnfChoice(options):
                return f"({' | '.join(self._regular(option) for option in options)})"
            case Repeat(item, least, most):
                return f"({self._regular(item)}){_bounds(least, most)}"


def _bounds(least: int, most: int | None) -> str:
    simple = {(0, None): "*", (1, None): "+", (0, 1): "?"}
    return simple.get((least, most)) or f"{{{least},{'' if most is None else most}}}"


def _names(node: Node) -> Iterator[str]:
    """Yields the names of rules that `node` references directly, repeated ones as often as they occur."""
    rest = [node]
    while rest:
        match rest.pop():
            case Name(value):
                yield value
            case EbnfSequence(items):
                rest.extend(items)
            case EbnfChoice(options):
                rest.extend(options)
            case Repeat(item, _, _):
                rest.append(item)


def _recursive(bodies: dict[str, Node]) -> set[str]:
    """Returns the rules from which a cycle can be reached, by repeatedly removing rules that reference only removed
    ones."""
    waiting = {name: set(_names(body)) for name, body in bodies.items()}
    users: dict[str, list[str]] = {name: [] for name in bodies}
    for name, named in waiting.items():
        for other in named:
            users[other].append(name)
    done = [name for name, named in waiting.items() if not named]
    while done:
        finished = done.pop()
        del waiting[finished]
        for user in users[finished]:
            waiting[user].discard(finished)
            if not waiting[user]:
                done.append(user)
    return set(waiting)
