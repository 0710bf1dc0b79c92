"""The most used method names of each service have one meaning, which docs/contributing/verbs.md states."""

from __future__ import annotations

import ast
import functools
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "docs" / "contributing" / "verbs.md"
SERVICES = ("worker", "scheduler", "frontend")
NUM_LISTED = 20  # most used names of a service that the table must have
NONE = "-"  # first argument of a method that takes none


class Definition(NamedTuple):
    """A public method; properties are no verbs."""

    place: str
    name: str
    first_argument: str


@functools.cache
def definitions(service: str) -> dict[str, list[Definition]]:
    """Returns the public methods of a service by name."""
    found: dict[str, list[Definition]] = defaultdict(list)
    for file in sorted((ROOT / "services" / service).rglob("*.py")):
        for definition in methods(ast.parse(file.read_text()), str(file.relative_to(ROOT))):
            found[definition.name].append(definition)
    return found


def methods(tree: ast.Module, place: str) -> Iterator[Definition]:
    """Yields the public methods of the classes of a module at `place`."""
    for owner in ast.walk(tree):
        for node in owner.body if isinstance(owner, ast.ClassDef) else ():
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or node.name.startswith("_"):
                continue
            if any("property" in ast.unparse(one) or "setter" in ast.unparse(one) for one in node.decorator_list):
                continue
            names = [one.arg for one in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
            given = [name for name in names if name not in ("self", "cls")]
            yield Definition(f"{place}:{node.lineno} {owner.name}", node.name, given[0] if given else NONE)


def rows() -> Iterator[tuple[str, str, str, set[str]]]:
    """Yields the table's rows: service, verb, meaning, and the allowed first arguments."""
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 4 and cells[0] in SERVICES:
            arguments = {one.strip(" `") for one in cells[3].split(",")}
            yield cells[0], cells[1].strip("`"), cells[2], arguments


def listed(service: str) -> dict[str, set[str]]:
    """Returns the first arguments of a service's verbs in the table."""
    return {verb: arguments for of, verb, _, arguments in rows() if of == service}


def test_methods_are_found_with_their_first_argument() -> None:
    tree = ast.parse("class A:\n def b(self, c, d): ...\n @property\n def e(self): ...\n async def f(self, *, g): ...")
    assert [definition[1:] for definition in methods(tree, "a.py")] == [("b", "c"), ("f", "g")]
    assert [*methods(ast.parse("class A:\n def b(self): ...\n def _c(self): ..."), "a.py")] == [("a.py:2 A", "b", NONE)]


def test_a_verb_of_a_service_has_one_row_with_a_meaning() -> None:
    keys = [(service, verb) for service, verb, _, _ in rows()]
    assert len(keys) == len(set(keys))
    assert all(meaning for _, _, meaning, _ in rows())


@pytest.mark.parametrize("service", SERVICES)
def test_the_most_used_names_are_in_the_table(service: str) -> None:
    by_count = sorted(definitions(service).items(), key=lambda item: (-len(item[1]), item[0]))
    missing = [f"{name} ({len(found)} definitions)" for name, found in by_count[:NUM_LISTED]]
    missing = [one for one in missing if one.split()[0] not in listed(service)]
    assert not missing, f"add their meaning to {TABLE.relative_to(ROOT)}, or rename those with another one"


@pytest.mark.parametrize("service", SERVICES)
def test_a_verb_is_defined_only_for_what_the_table_says(service: str) -> None:
    wrong = [
        f"{definition.place}.{verb}({definition.first_argument})"
        for verb, arguments in listed(service).items()
        for definition in definitions(service)[verb]
        if definition.first_argument not in arguments
    ]
    assert not wrong, f"name these methods by what they do; the verbs' meanings are in {TABLE.relative_to(ROOT)}"


@pytest.mark.parametrize("service", SERVICES)
def test_the_table_has_no_verbs_and_arguments_that_are_gone(service: str) -> None:
    used = {verb: {one.first_argument for one in definitions(service)[verb]} for verb in listed(service)}
    assert listed(service) == used
