"""Tests see what users see: how often they look into private parts, replace attributes and sleep only falls."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# What there is today: whoever needs one more finds another way, and whoever removes some lowers the ceiling.
MOST_PRIVATE_REACHES = 96
MOST_REPLACED_ATTRIBUTES = 235
MOST_SLEEPS = 59


def private_reaches(node: ast.AST) -> bool:
    """An attribute with an underscore, of an object that is not the test's own."""
    return (
        isinstance(node, ast.Attribute)
        and node.attr.startswith("_")
        and not node.attr.startswith("__")
        and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"))
    )


def replaced_attributes(node: ast.AST) -> bool:
    """A call of MonkeyPatch.setattr(), or of unittest's patch()."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return False
    return node.func.attr == "setattr" or ast.unparse(node.func) in ("mock.patch", "mock.patch.object")


def sleeps(node: ast.AST) -> bool:
    """A call that lets time pass, in place of one of tests/waiting.py."""
    return isinstance(node, ast.Call) and ast.unparse(node.func) in ("asyncio.sleep", "time.sleep")


CEILINGS = {
    private_reaches: MOST_PRIVATE_REACHES,
    replaced_attributes: MOST_REPLACED_ATTRIBUTES,
    sleeps: MOST_SLEEPS,
}


@functools.cache
def found() -> dict[Callable[[ast.AST], bool], list[str]]:
    """The places of each habit: every file is read once."""
    places: dict[Callable[[ast.AST], bool], list[str]] = {is_one: [] for is_one in CEILINGS}
    for file in sorted((ROOT / "tests").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            for is_one, seen in places.items():
                if is_one(node):
                    seen.append(f"{file.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {ast.unparse(node)[:80]}")
    return places


@pytest.mark.parametrize("is_one", CEILINGS, ids=lambda is_one: is_one.__name__)
def test_a_habit_does_not_come_back(is_one: Callable[[ast.AST], bool]) -> None:
    places = found()[is_one]
    assert len(places) <= CEILINGS[is_one], "\n".join(places)
