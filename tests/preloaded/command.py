"""Runs `quire ...` for tests as a fork of a process that has imported it. What only a new interpreter shows (imports,
signals during them, an environment that Python reads) is tested with one."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from typing import IO, Any

from quire.cluster import process
from tests.preloaded.forked import Forked

QUIRE = (sys.executable, "-P", "-m", "quire")
File = int | IO[Any] | None


@contextlib.contextmanager
def started(
    *arguments: str,
    env: Mapping[str, str] | None = None,
    stdin: str | int = "",
    stdout: File = None,
    stderr: File = None,
) -> Iterator[Forked]:
    """Runs a command until the end of the context, which kills it if it still runs. `env`: variables beside those of
    the test run; `stdin`: what it reads, or a descriptor; PIPE makes a text file of its output."""
    with contextlib.ExitStack() as theirs, contextlib.ExitStack() as ours:
        files = [_input(stdin, theirs)]
        outputs = []
        for file, usual in ((stdout, sys.__stdout__), (stderr, sys.__stderr__)):
            if file == subprocess.PIPE:
                reads, writes = os.pipe()
                outputs.append(ours.enter_context(os.fdopen(reads, "r")))
                theirs.callback(os.close, writes)
                files.append(writes)
                continue
            theirs_now = usual if file is None else file
            assert theirs_now is not None
            files.append(theirs_now if isinstance(theirs_now, int) else theirs_now.fileno())
            outputs.append(None)
        environment = {**os.environ, **(env or {})}
        forked = zygotes().start_command((*QUIRE, *arguments), environment, files)
        theirs.close()
        forked.stdout, forked.stderr = outputs
        try:
            yield forked
        finally:
            forked.kill()
            forked.wait()


def _input(stdin: str | int, kept: contextlib.ExitStack) -> int:
    if isinstance(stdin, int):
        return stdin
    file = kept.enter_context(tempfile.TemporaryFile("w+"))  # noqa: SIM115 - the stack closes it
    file.write(stdin)
    file.seek(0)
    return file.fileno()


def run(*arguments: str, env: Mapping[str, str] | None = None, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs a command to its end and returns its status and output."""
    with tempfile.TemporaryFile("w+") as stdout, tempfile.TemporaryFile("w+") as stderr:
        with started(*arguments, env=env, stdin=stdin, stdout=stdout, stderr=stderr) as forked:
            status = forked.wait()
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess((*QUIRE, *arguments), status, stdout.read(), stderr.read())


def zygotes() -> Any:
    """Returns the zygotes that tests/conftest.py has made the launcher of quire.cluster."""
    return process.launch.__self__  # type: ignore[attr-defined]
