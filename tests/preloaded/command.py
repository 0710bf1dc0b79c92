"""Runs `quire ...` for tests as a fork of a process that has imported it. What only a new interpreter shows (imports,
signals during them, an environment that Python reads) is tested with one."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import IO, Any

from quire.cluster import process
from tests.preloaded.forked import Forked

QUIRE = (sys.executable, "-P", "-m", "quire")


def start(
    *arguments: str, env: Mapping[str, str] | None = None, stdout: IO[Any], stderr: IO[Any] | None = None, stdin: str = ""
) -> Forked:
    """Starts a command. `env`: variables beside those of the test run; `stdin`: what it reads."""
    with tempfile.TemporaryFile("w+") as read:
        read.write(stdin)
        read.seek(0)
        files = (read.fileno(), stdout.fileno(), sys.__stderr__.fileno() if stderr is None else stderr.fileno())
        return zygotes().start_command((*QUIRE, *arguments), {**os.environ, **(env or {})}, files)


def run(
    *arguments: str, env: Mapping[str, str] | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its status and output."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        status = start(*arguments, env=env, stdout=stdout, stderr=stderr, stdin=stdin).wait()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess((*QUIRE, *arguments), status, stdout.read(), stderr.read())


def zygotes() -> Any:
    """Returns the zygotes that tests/conftest.py has made the launcher of quire.cluster."""
    return process.launch.__self__  # type: ignore[attr-defined]
