"""Limits how often tests access private parts, replace attributes and sleep; the limits only decrease."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Current counts. They must not increase; a change that removes some lowers the ceiling.
MOST_PRIVATE_REACHES = 88
MOST_REPLACED_ATTRIBUTES = 97
MOST_SLEEPS = 57


def private_reaches(node: ast.AST) -> bool:
    """Whether the node accesses an attribute with a leading underscore of an object other than the test's own."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and node.attr not in ("_replace", "_asdict", "_fields")  # public methods of named tuples
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    )


def replaced_attributes(node: ast.AST) -> bool:
    """Whether the node calls MonkeyPatch.setattr(), or unittest's patch()."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return node.func.attr == "setattr" or ast.unparse(node.func) in ("mock.patch", "mock.patch.object")


def sleeps(node: ast.AST) -> bool:
    """Whether the node calls a sleep instead of a helper of tests/waiting.py."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.sleep", "time.sleep")


MAY_HAVE_ONE = re.compile(r"\._[a-z]|setattr|mock\.patch|\.sleep\(")
CEILINGS = {
    private_reaches: MOST_PRIVATE_REACHES,
    replaced_attributes: MOST_REPLACED_ATTRIBUTES,
    sleeps: MOST_SLEEPS,
}


@functools.cache
def found() -> dict[Callable[[ast.AST], bool], list[str]]:
    """Returns the places of each habit; every file is read once."""
    places: dict[Callable[[ast.AST], bool], list[str]] = {is_one: [] for is_one in CEILINGS}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        text = file.read_text()
        if not MAY_HAVE_ONE.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            for is_one, seen in places.items():
                if is_one(node):
                    seen.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}")
    return places


@pytest.mark.parametrize("is_one", CEILINGS, ids=lambda is_one: is_one.__name__)
def test_a_habit_does_not_come_back(is_one: Callable[[ast.AST], bool]) -> None:
    places = found()[is_one]
    assert len(places) <= CEILINGS[is_one], "\n".join(places)
