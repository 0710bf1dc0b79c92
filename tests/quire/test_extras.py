"""Advice to install an extra names one that there is, quoted so that shells keep its brackets."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import quire

ROOT = Path(quire.__file__).resolve().parents[1]
ADVICE = re.compile(r"pip install (\S*?)quire\[([\w,-]+)\](.)")


def test_advice_names_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    found = [
        advice
        for folder in ("quire", "services", "shared", "kernels")
        for file in (ROOT / folder).rglob("*.py")
        for advice in ADVICE.findall(file.read_text())
    ]
    assert found
    for before, names, after in found:
        assert (before, after) == ("'", "'")
        assert set(names.split(",")) <= extras.keys()
