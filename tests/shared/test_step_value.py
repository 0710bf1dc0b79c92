"""Step values are immutable for the type checker and cheap at run time."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import field, replace
from pathlib import Path

import pytest

from quire import shared
from quire.shared.step_value import step_value

CHANGES = """
from quire.shared.step_value import step_value

@step_value
class Point:
    x: int
    y: int = 0

def move(point: Point) -> Point:
    point.x = 2
    return Point(x="3")
"""


@step_value
class Point:
    x: int
    y: int = 0
    seen: int = field(default=0, compare=False)


def test_it_is_a_dataclass() -> None:
    point = Point(1, seen=5)
    assert replace(point, x=2) == Point(2, 0)
    assert repr(point) == "Point(x=1, y=0, seen=5)"
    assert not hasattr(point, "__dict__")


def test_its_fields_are_set_without_a_call() -> None:
    assert "__setattr__" not in Point.__init__.__code__.co_names


@pytest.mark.slow
def test_the_type_checker_lets_nobody_change_one(tmp_path: Path) -> None:
    source = tmp_path / "changes.py"
    source.write_text(CHANGES)
    root = Path(shared.__file__).parents[2]
    command = [sys.executable, "-m", "mypy", "--config-file=", f"--cache-dir={tmp_path}", "--follow-imports=silent"]
    said = subprocess.run([*command, str(source)], cwd=root, capture_output=True, text=True, check=False).stdout
    assert 'changes.py:10: error: Property "x" defined in "Point" is read-only' in said
    assert 'changes.py:11: error: Argument "x" to "Point" has incompatible type "str"' in said
