"""Frontends and schedulers run without torch; a config.json is checked before torch is imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from quire.services.worker.models.registry import ARCHITECTURES

BLOCKED = ("torch", "triton", "transformers", "safetensors")

PROGRAM = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ImportError(name + " must not be needed here")

sys.meta_path.insert(0, Refuse())
import importlib
for module in {modules!r}:
    importlib.import_module(module)
"""


@pytest.mark.parametrize(
    "modules",
    [
        ["quire.services.frontend.main"],
        ["quire.services.scheduler.main"],
        [
            "quire",
            "quire.client",
            "quire.llm",
            "quire.async_llm",
            "quire.checkpoints.merge_adapter",
            "quire.cli.main",
            "quire.cli.up",
            "quire.cli.status",
            "quire.cli.services",
        ],
        ["quire.services.worker.models.registry", *(name.partition(":")[0] for name in ARCHITECTURES.values())],
    ],
)
def test_nothing_pulls_in_a_tensor_library(modules: list[str]) -> None:
    program = PROGRAM.format(blocked=BLOCKED, modules=modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
