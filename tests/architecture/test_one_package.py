"""Every folder of the product is a part of the package `quire`, and no module imports it by another name."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINKED = ("services", "shared", "kernels", "protos")
NAMES = "|".join(LINKED)
SUSPECT = re.compile(
    rf"^\s*(?:from\s+(?:{NAMES})\b|import\b.*(?<![\w.])(?:{NAMES})\b)", re.M
)  # parsing all takes seconds
PLACES = (*LINKED, "quire", "tests", "tools")


@pytest.mark.parametrize("name", LINKED)
def test_the_package_links_to_the_folder(name: str) -> None:
    link = ROOT / "quire" / name
    assert link.is_symlink()
    assert link.readlink() == Path("..") / name
    assert (ROOT / name / "__init__.py").is_file()  # import-linter looks into no folder without it


def imported(path: Path) -> set[str]:
    """Returns the top-level packages that a file imports; parses only files with a line that looks like such an
    import."""
    found: set[str] = set()
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if SUSPECT.search(text) else ():
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.partition(".")[0])
    return found


def test_nothing_is_imported_from_a_folder_beside_the_package() -> None:
    files = [path for place in PLACES for path in (ROOT / place).rglob("*.py") if not path.is_symlink()]
    wrong = {str(path.relative_to(ROOT)) for path in files if imported(path) & set(LINKED)}
    assert wrong == set()
