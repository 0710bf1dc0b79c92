"""Process that compiles kernels at the first start on a machine.

It is started before the worker imports torch, which takes seconds in both processes. Therefore this module imports
neither torch nor Triton."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from quire.shared.settings import WorkerSettings

MODULE = "quire.services.worker.warmup.compile_kernels"
MARKERS = "quire-*.compiled"  # written after kernels have been compiled
MAX_WAIT_S = 120.0  # compiling takes 10 s on idle cores


class CompileProcess:
    """A compile process and its children, in one process group: if one hangs, all are killed."""

    def __init__(self, settings: WorkerSettings, module: str = MODULE) -> None:
        """Starts the process and sends it the settings as JSON on standard input."""
        command = [sys.executable, "-P", "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True, start_new_session=True)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # wait() reports the failure
            self._process.stdin.write(settings.model_dump_json())
            self._process.stdin.close()

    def wait(self, max_wait_s: float = MAX_WAIT_S) -> bool:
        """Waits for the process; returns whether it succeeded. After `max_wait_s` it is killed with its children.
        Kernels it missed are compiled on first use."""
        try:
            return self._process.wait(max_wait_s) == 0
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            return False


def start(settings: WorkerSettings, module: str = MODULE) -> CompileProcess | None:
    """Starts a compile process, or returns None if nothing has to be compiled, by a cheap check: device, cores and the
    marker of an earlier compilation."""
    if not needs_compilation(settings) or any(cache_folder().glob(MARKERS)):
        return None
    return CompileProcess(settings, module)


def needs_compilation(settings: WorkerSettings) -> bool:
    """Returns whether kernels are compiled ahead: on a GPU, without quantization at load, with more than two cores."""
    return settings.device == "cuda" and settings.quantization == "none" and num_cores(settings) > 2


def num_cores(settings: WorkerSettings) -> int:
    """Returns the number of CPU threads to use: the setting, or all cores of this process."""
    return settings.threads or len(os.sched_getaffinity(0))


def cache_folder() -> Path:
    """Returns Triton's cache folder."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    return Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
