"""`quire scheduler`, twice on one machine."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from shared.rpc import admin_pass

COMMAND = (sys.executable, "-m", "quire", "scheduler", "--grpc-port", "0", "--metrics-port", "0", "--redis", "none")


@contextlib.contextmanager
def scheduler(folder: Path) -> Iterator[str]:
    """Its id, as the line says that tells that it is ready."""
    environment = {**os.environ, admin_pass.RUNTIME_VARIABLE: str(folder)}
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
