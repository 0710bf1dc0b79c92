"""The process that compiles kernels at the first start on a machine.

It is begun before the worker imports torch, which takes seconds, as it does there. This module therefore imports
neither torch nor Triton.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from quire.shared.settings import WorkerSettings

MODULE = "quire.services.worker.warmup.compile_kernels"
MARKERS = "quire-*.compiled"  # left behind where kernels have been compiled
MAX_WAIT_S = 120.0  # it takes 10, where it has cores to itself


class CompileProcess:
    """And those that it becomes, which are a process group: one that hangs is ended with all of them."""

    def __init__(self, settings: WorkerSettings) -> None:
        command = [sys.executable, "-P", "-m", MODULE]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # wait() says so
            self._process.stdin.write(settings.model_dump_json())
            self._process.stdin.close()

    def wait(self) -> bool:
        """Whether all went well. What it has not compiled will be where it is called."""
        try:
            return self._process.wait(MAX_WAIT_S) == 0
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return False


def start(settings: WorkerSettings) -> CompileProcess | None:
    """None where nothing will have to be compiled, as far as can be said in a moment."""
    if not needs_compilation(settings) or any(cache_folder().glob(MARKERS)):
        return None
    return CompileProcess(settings)


def needs_compilation(settings: WorkerSettings) -> bool:
    return settings.device == "cuda" and settings.quantization == "none" and num_cores(settings) > 2


def num_cores(settings: WorkerSettings) -> int:
    return settings.threads or len(os.sched_getaffinity(0))


def cache_folder() -> Path:
    """Triton's."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
