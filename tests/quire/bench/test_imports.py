"""Measuring needs no tensor library: the client half of a bench runs anywhere."""

from __future__ import annotations

import subprocess
import sys

from quire.cli.bench import MODES
from tests.architecture.test_imports import BLOCKED, PROGRAM


def test_no_mode_pulls_in_a_tensor_library() -> None:
    modules = ["quire.cli.bench", *(module for module, _ in MODES.values())]
    program = PROGRAM.format(blocked=BLOCKED, modules=modules)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
