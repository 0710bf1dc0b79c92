"""Generated code is compatible with the required protobuf versions."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WRITTEN_FOR = re.compile(r"Domain\.PUBLIC,\s+(\d+),\s+(\d+),\s+(\d+)")


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def test_the_oldest_protobuf_that_may_be_installed_loads_what_is_generated() -> None:
    """Protobuf refuses, when it is imported, what a newer one's compiler has written."""
    found = [WRITTEN_FOR.search(path.read_text()) for path in (ROOT / "shared" / "pb").rglob("*_pb2.py")]
    written_for = {numbers(".".join(match.groups())) for match in found if match}
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (bounds,) = (line.removeprefix("protobuf") for line in asked if re.match(r"protobuf[<>=]", line))
    oldest, newest = re.findall(r"[\d.]+", bounds)
    assert max(written_for) <= numbers(oldest) < numbers(newest)
