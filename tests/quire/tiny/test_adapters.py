"""The shipped adapters: small, and readable as the worker reads them."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bundled import ADAPTERS, FOLDER
from quire.services.worker.lora.peft import peft_folder


@pytest.mark.parametrize("name", ["json", "pirate"])
def test_an_adapter_is_small_and_of_all_of_attention(name: str) -> None:
    folder = ADAPTERS / name
    assert sum(file.stat().st_size for file in folder.iterdir()) < 1_000_000
    modules = peft_folder.read(name, folder).modules
    assert {module.rpartition(".")[2] for module in modules} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    assert len(modules) == 8 * 4


@pytest.mark.parametrize("page", ["docs/models/lora.md", "quire/tiny/adapters/README.md"])
def test_the_folders_of_a_page_are_there_without_a_checkout(page: str, tmp_path: Path) -> None:
    """The line that names them is run elsewhere."""
    root = FOLDER.parents[2]
    (line,) = re.findall(r"^(?:\$ )?(ADAPTERS=\$\(python3 -c .*\))$", (root / page).read_text(), re.MULTILINE)
    (lora,) = re.findall(r"quire up --lora (\S+)", (root / page).read_text())
    script = f'python3() {{ {sys.executable} "$@"; }}; {line}; echo {lora}'
    environment = {"PYTHONPATH": str(root), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["sh", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    for named in done.stdout.strip().split(","):
        assert (Path(named.partition("=")[2]) / "adapter_config.json").is_file()
