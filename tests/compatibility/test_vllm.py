"""Tests that the table of vLLM's tests names existing tests and gives a verdict for each row."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_name("vllm.md")
FRONTEND = "tests/services/frontend/"
ROW = re.compile(r"^\| `.*\|$", re.M)
NAMED = re.compile(r"`((?:tests/|openai_edge/|streams/)[\w/]+\.py)(?:::(\w+))?`")
SHOWN, LEFT = ("passes", "mended"), ("not offered", "internal")
ROWS = [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in ROW.findall(TABLE.read_text())]


@cache
def functions(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text())
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_each_row_names_an_existing_test_or_a_reason(row: tuple[str, ...]) -> None:
    _, _, verdict, reason = row
    assert verdict in (*SHOWN, *LEFT)
    named = NAMED.findall(reason)
    assert named or verdict in LEFT
    for file, function in named:
        path = file if file.startswith("tests/") else FRONTEND + file
        assert (ROOT / path).is_file()
        assert not function or function in functions(path)
    assert len(reason) > len("none")


def test_every_test_of_the_three_areas_has_a_row() -> None:
    """Checks the number of rows: 32 of Harmony over HTTP, 21 of the parsable context, 9 of metrics, 5 files that test
    vLLM's internals."""
    assert len(ROWS) == 32 + 21 + 9 + 5
