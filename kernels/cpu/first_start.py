"""Compiles the library into the user's cache at the first start on a machine without a suitable build."""

from __future__ import annotations

import contextlib
import fcntl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

from quire.kernels.cpu import build, built


def ensure(report: Callable[[str], None]) -> bool:
    """Returns whether a library suits this machine, compiling one if necessary; `report` receives reason and
    consequence.

    Call before anything of quire.kernels.cpu is loaded. Processes that start concurrently compile it once.
    """
    if built.suitable() is not None:
        return True
    reason, compiler = built.unsuitable(), build.find_compiler()
    if compiler is None:
        report(f"no compiled CPU kernels ({reason}) and no C++ compiler: plain torch, several times slower, is used")
        return False
    try:
        with _alone(built.cached()) as directory:
            if built.unsuitable(directory) is not None:
                report(f"compiling the CPU kernels, once for this machine, into {directory}")
                build.build(compiler, "native", directory)
                build.remove_objects(directory)
    except (OSError, subprocess.CalledProcessError) as error:
        report(f"no compiled CPU kernels: plain torch, several times slower, is used: {_words(error)}")
    return built.suitable() is not None


@contextlib.contextmanager
def _alone(directory: Path) -> Iterator[Path]:
    """Creates the folder and holds its lock file exclusively, waiting for other processes; yields the folder."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield directory


def _words(error: OSError | subprocess.CalledProcessError) -> str:
    return error.stderr if isinstance(error, subprocess.CalledProcessError) else str(error)
