"""Superfluous files of frontend and scheduler images are found, and no others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.deploy.images.contents import has_symbols, superfluous

PACKAGES = "opt/quire/lib/python3.11/site-packages"
TINY = f"{PACKAGES}/quire/tiny/model"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in ("tokenizers/__init__.py", "quire/tiny/model/tokenizer.json", "numpy/_core/lib.py", "pip_api/pip.py"):
        path = tmp_path / PACKAGES / name
        path.parent.mkdir(parents=True)
        path.write_bytes(b"")
    (tmp_path / "usr/lib/python3.11/test/tests").mkdir(parents=True)  # Debian's, as a whole
    return tmp_path


def test_an_image_of_what_is_used_is_lean(root: Path) -> None:
    assert superfluous(root) == []


@pytest.mark.parametrize("name", [f"{TINY}/model.safetensors", f"{PACKAGES}/a/tests", f"{PACKAGES}/pip"])
def test_weights_tests_and_tools_of_packages_are_told(name: str, root: Path) -> None:
    (root / name).mkdir(parents=True)
    assert superfluous(root) == [name]


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("strip")), reason="makes a library")
def test_a_library_with_symbols_is_told_until_it_is_stripped(root: Path) -> None:
    (root / "one.c").write_text("int one(void) { return 1; }\n")
    inside, rewritten = root / PACKAGES / "tokenizers/one.so", root / PACKAGES / "numpy/_core/one.so"
    subprocess.run(["gcc", "-g", "-shared", "-fPIC", "-o", inside, root / "one.c"], check=True)
    shutil.copy(inside, rewritten)
    assert has_symbols(inside.read_bytes())
    assert superfluous(root) == [str(inside.relative_to(root))]
    subprocess.run(["strip", "--strip-unneeded", inside], check=True)
    assert not has_symbols(inside.read_bytes())
    assert superfluous(root) == []
