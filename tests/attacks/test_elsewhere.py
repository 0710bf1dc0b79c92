"""The table of other attacks names existing tests, and the README lists each of its rows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.attacks.elsewhere import ELSEWHERE

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ELSEWHERE)
def test_each_is_tried_by_a_test_that_is_there(name: str) -> None:
    _, tests = ELSEWHERE[name]
    assert tests
    for test in tests:
        path, _, function = test.partition("::")
        assert (ROOT / path).exists(), path
        if function:
            found = ast.walk(ast.parse((ROOT / path).read_text()))
            named = {node.name for node in found if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
            assert function in named, test


def test_the_readme_has_each_row() -> None:
    text = (ROOT / "tests/attacks/README.md").read_text()
    for name, (holds, _) in ELSEWHERE.items():
        assert f"| {name} | {holds} |" in text
