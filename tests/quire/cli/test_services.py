"""`quire scheduler`: unique names of two on one machine, and a clean exit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from quire.shared.process.runtime_folder import RUNTIME_VARIABLE

AT_THE_END = """
import os, sys

class TakenAway:
    def __del__(self, write=os.write):
        write(1, b"Python's own end")

sys.taken_away = TakenAway()
"""
COMMAND = (sys.executable, "-m", "quire", "scheduler", "--grpc-port", "0", "--metrics-port", "0", "--redis", "none")


@contextlib.contextmanager
def scheduler(folder: Path) -> Iterator[str]:
    """Returns the id from the ready line."""
    environment = {**os.environ, RUNTIME_VARIABLE: str(folder)}
    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = next(line for line in process.stdout if "ready" in line)
            found = re.search(r" id=(\S+)", line)
            assert found is not None
            yield found[1]
        finally:
            process.kill()


def test_two_processes_of_one_service_that_nobody_named_have_names_of_their_own(tmp_path: Path) -> None:
    with scheduler(tmp_path) as first, scheduler(tmp_path) as second:
        assert [first, second] == [f"scheduler-{socket.gethostname()}", f"scheduler-{socket.gethostname()}-2"]


def test_a_service_ends_before_python_takes_anything_away_from_its_threads(tmp_path: Path) -> None:
    """Threads may be inside a library's code; a finalization under them would end the process by a signal."""
    (tmp_path / "sitecustomize.py").write_text(AT_THE_END)
    path = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, RUNTIME_VARIABLE: str(tmp_path), "PYTHONPATH": path}

    def ended(*command: str) -> tuple[int, bytes]:
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=False)
        return done.returncode, done.stdout

    _, told = ended(sys.executable, "-m", "quire", "version")
    assert told.endswith(b"Python's own end"), "it would be seen"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert ended(*COMMAND, "--grpc-port", port) == (2, b"")
    with subprocess.Popen(COMMAND, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert b"ready" in process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert process.stdout.read() == b""
        assert process.wait() == 0
