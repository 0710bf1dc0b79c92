"""Replacement for subprocess.Popen in quire.cluster that forks from a zygote where possible."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from quire.cluster.process import ROOT, python_path
from quire.shared.process import allocator
from tests.preloaded.zygote import LENGTH, MODULES, STATUS

# The last two are set by libraries that some tests import.
OF_ONE_START = ("QUIRE_", "PYTEST_", "TOKENIZERS_PARALLELISM", "TORCHINDUCTOR_CACHE_DIR")
POLL_S = 0.05


class Zygotes:
    """Zygotes of this process, one per role, created on first use. They end with it, and have its environment at the
    time of their creation."""

    def __init__(self) -> None:
        everybodys = lasting(os.environ) | {"PYTHONPATH": python_path()}
        self._environments = {role: everybodys | allocator.environment(role, os.environ) for role in MODULES}
        self._lock = threading.Lock()
        self._asking: dict[str, socket.socket] = {}
        self._processes: list[subprocess.Popen[bytes]] = []
        atexit.register(self._end)

    def start(self, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        """Starts a process: a fork for services with this environment, apart from PYTHONPATH folders with a
        sitecustomize module; otherwise subprocess.Popen(...)."""
        role = args[4] if list(args[1:4]) == ["-P", "-m", "quire"] else ""
        folders = env.get("PYTHONPATH", "").split(os.pathsep)
        custom = [str(file) for file in (Path(folder, "sitecustomize.py") for folder in folders) if file.exists()]
        usual = [folder for folder in folders if not Path(folder, "sitecustomize.py").exists()]
        if self._environments.get(role) != lasting(env) | {"PYTHONPATH": os.pathsep.join(usual)}:
            return subprocess.Popen(args, env=env, **options)
        (stdin, to_it), (from_it, stdout), (errors_of_it, stderr) = os.pipe(), os.pipe(), os.pipe()
        told, tell = os.pipe()
        asked = {"command": args, "environment": dict(env), "folder": os.getcwd(), "custom": custom}
        pid = self._fork(role, asked, [stdin, stdout, stderr, tell])
        for theirs in (stdin, stdout, stderr, tell):
            os.close(theirs)
        output, error = (os.fdopen(end, errors=options["errors"]) for end in (from_it, errors_of_it))
        return Forked(args, pid, told, os.fdopen(to_it, "w"), output, error)

    def _fork(self, role: str, asked: dict[str, Any], files: list[int]) -> int:
        """Forks a service and returns its process id."""
        content = json.dumps(asked).encode()
        with self._lock:
            self._begin()
            asking = self._asking[role]
            socket.send_fds(asking, [LENGTH.pack(len(content))], files)
            asking.sendall(content)
            answer = asking.recv(STATUS.size)
        if not answer:
            raise RuntimeError(f"the process that each {role} is forked from has ended")
        return int(STATUS.unpack(answer)[0])

    def _begin(self) -> None:
        """Starts all zygotes at once, because each takes time and usually all are needed."""
        for role in self._environments.keys() - self._asking.keys():
            self._asking[role], other = socket.socketpair()
            with other:
                words = ["quire", role]  # by which tools know a service, whose command line this becomes
                command = [sys.executable, "-m", "tests.preloaded.zygote", str(other.fileno()), *words]
                options: Any = {"env": self._environments[role], "pass_fds": [other.fileno()]}
                self._processes.append(subprocess.Popen(command, **options, cwd=ROOT, start_new_session=True))

    def _end(self) -> None:
        for asking in self._asking.values():
            asking.close()
        for process in self._processes:
            process.wait()


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without variables that change between starts and that no import reads."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_ONE_START)}


class Forked:
    """The part of subprocess.Popen that quire.cluster needs."""

    def __init__(
        self, args: Sequence[str], pid: int, status: int, stdin: IO[str], stdout: IO[str], stderr: IO[str]
    ) -> None:
        self.args, self.pid, self.stdin, self.stdout, self.stderr = args, pid, stdin, stdout, stderr
        self.returncode: int | None = None
        self._status, self._lock = status, threading.Lock()

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        ends_s = None if timeout is None else time.monotonic() + timeout
        while (status := self._look(POLL_S)) is None:
            if ends_s is not None and time.monotonic() >= ends_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _look(self, patience_s: float) -> int | None:
        with self._lock:
            if self.returncode is None and self._is_told(patience_s):
                told = os.read(self._status, STATUS.size)
                os.close(self._status)
                self.returncode = STATUS.unpack(told)[0]
            return self.returncode

    def _is_told(self, patience_s: float) -> bool:
        waiting = select.poll()
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(1000 * patience_s))
