"""Paths, programs and make targets named in the READMEs exist."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.docs.reference import PAGES
from tools.docs.reference.protos import PROTOS

ROOT = Path(__file__).parents[2]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
FOLDERS = {str(folder) for name in TRACKED for folder in Path(name).parents}
AREAS = ("dialects", *(folder.name for folder in (PROTOS / "quire").iterdir()))
GENERATED = {f"docs/{page}" for page in (*PAGES, *(f"reference/protos/{area}.md" for area in AREAS))}
THERE = {*TRACKED, *FOLDERS, *GENERATED}
ROOMS = ("services", "shared", "quire", "kernels", "tests", "k8s", "protos", "tools")
NAMED = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOMS)})/[\w./-]*\w")
LINKED = re.compile(r"\]\((?!https?:|mailto:|#)([^)#\s]+)")
PROGRAM = re.compile(rf"python -m ((?:{'|'.join(ROOMS)})[\w.]*)")
LINKED_PACKAGE = re.compile(r"^quire/((?:services|shared|kernels|protos)\b)")  # quire/services is a link to services
NO_PATHS = {"quire/block/1", "quire/handshake/1"}  # what is hashed first, which tells hashes apart
TARGET = re.compile(r"`make ([\w-]+)`")
PYTHON_FILE = re.compile(r"\b([\w-]+\.py)\b")
OF_OTHERS = {"tests/compatibility/vllm.md"}  # names files of vLLM


def is_there(path: str) -> bool:
    """Whether a path exists; tests are named without suffix, protos as protoc finds them."""
    path = LINKED_PACKAGE.sub(r"\1", path)
    return path in THERE or f"{path}.py" in THERE or f"protos/{path}" in THERE


def missing(name: str) -> list[str]:
    text, folder = (ROOT / name).read_text(), (ROOT / name).parent
    linked = {str((folder / link).resolve().relative_to(ROOT)) for link in LINKED.findall(text)}
    beside = str(folder.relative_to(ROOT))
    named = {path for path in set(NAMED.findall(text)) - NO_PATHS if not is_there(f"{beside}/{path}")}
    programs = {program.replace(".", "/") for program in PROGRAM.findall(text)}
    targets = set(TARGET.findall(text)) - set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    return sorted(path for path in linked | named | programs if not is_there(path)) + sorted(targets)


@pytest.mark.parametrize("name", [name for name in TRACKED if name.endswith(".md")])
def test_what_a_page_names_is_there(name: str) -> None:
    assert missing(name) == []


@pytest.mark.parametrize("name", [name for name in TRACKED if name.endswith(".md") and name not in OF_OTHERS])
def test_files_that_a_page_names_without_their_folder_exist(name: str) -> None:
    there = {Path(path).name for path in TRACKED}
    assert set(PYTHON_FILE.findall((ROOT / name).read_text())) - there == set()
