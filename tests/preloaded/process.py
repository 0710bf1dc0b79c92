"""Replacements for subprocess.Popen in quire.cluster and quire.shared.process.child, and a way to run commands, that
fork from a zygote where possible."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from quire.cluster.process import ROOT, python_path
from quire.shared.process import allocator
from tests.preloaded.forked import Forked
from tests.preloaded.zygote import CHILD, COMMAND, LENGTH, MODULES, SHARED, STATUS

# The last three are set by libraries that some tests import, and by commands; devices are read after the fork.
OF_ONE_START = (
    "QUIRE_",
    "CUDA_VISIBLE_DEVICES",
    "PYTEST_",
    "TOKENIZERS_PARALLELISM",
    "TORCHINDUCTOR_CACHE_DIR",
    "GRPC_VERBOSITY",
)
SERVICES = tuple(role for role in MODULES if role not in (CHILD, COMMAND))


class Zygotes:
    """Zygotes of this process, one per role, created on first use. They end with it, and have its environment at the
    time of their creation. Commands that are forked from one share those of services."""

    def __init__(
        self,
        environment: Mapping[str, str] = os.environ,
        asking: Mapping[str, socket.socket] | None = None,
        lock: str = "",
    ) -> None:
        """`asking`: sockets of the zygotes that another process has started with `environment`, with `lock`, the file
        whose lock serializes requests of several processes."""
        self._environments = {role: lasting(environment) for role in (CHILD, COMMAND)}
        for role in SERVICES:
            self._environments[role] = lasting(environment) | allocator.environment(role, environment)
            self._environments[role] |= {"PYTHONPATH": python_path()}
        self._lock = threading.Lock()
        self._asking: dict[str, socket.socket] = dict(asking or {})
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lock_file = open(lock) if lock else tempfile.NamedTemporaryFile(prefix="zygotes")  # noqa: SIM115
        atexit.register(self._end)

    def start(self, args: Sequence[str], *, env: Mapping[str, str], **options: Any) -> Any:
        """Starts a process: a fork for services with this environment, apart from PYTHONPATH folders with a
        sitecustomize module; otherwise subprocess.Popen(...)."""
        role = args[4] if list(args[1:4]) == ["-P", "-m", "quire"] else ""
        folders = env.get("PYTHONPATH", "").split(os.pathsep)
        custom = [str(file) for file in (Path(folder, "sitecustomize.py") for folder in folders) if file.exists()]
        usual = [folder for folder in folders if not Path(folder, "sitecustomize.py").exists()]
        if role not in SERVICES or self._environments[role] != lasting(env) | {"PYTHONPATH": os.pathsep.join(usual)}:
            return subprocess.Popen(args, env=env, **options)
        (stdin, to_it), (from_it, stdout), (errors_of_it, stderr) = os.pipe(), os.pipe(), os.pipe()
        output, error = (os.fdopen(end, errors=options["errors"]) for end in (from_it, errors_of_it))
        try:
            forked = self._fork(role, args, env, (stdin, stdout, stderr), custom)
        finally:
            for theirs in (stdin, stdout, stderr):
                os.close(theirs)
        forked.stdin, forked.stdout, forked.stderr = os.fdopen(to_it, "w"), output, error
        return forked

    def start_child(self, args: Sequence[str], *, stderr: IO[bytes], **options: Any) -> Any:
        """Starts a child process of a service: a fork if its module is preloaded and the environment is that of the
        test run, otherwise subprocess.Popen(...)."""
        if args[3] not in MODULES[CHILD] or lasting(os.environ) != self._environments[CHILD]:
            return subprocess.Popen(args, stderr=stderr, **options)
        (stdin, to_it), (from_it, stdout) = os.pipe(), os.pipe()
        try:
            forked = self._fork(CHILD, args, os.environ, (stdin, stdout, stderr.fileno()))
        finally:
            os.close(stdin)
            os.close(stdout)
        forked.stdin, forked.stdout = os.fdopen(to_it, "wb"), os.fdopen(from_it, "rb")
        return forked

    def start_command(self, args: Sequence[str], env: Mapping[str, str], files: Sequence[int]) -> Forked:
        """Starts `python -P -m quire ...` as a fork, which cannot heed variables that Python reads when it starts.
        `files`: its stdin, stdout and stderr."""
        assert of_python(env) == of_python(self._environments[COMMAND])
        return self._fork(COMMAND, args, env, files)

    def _fork(
        self,
        role: str,
        args: Sequence[str],
        env: Mapping[str, str],
        files: Sequence[int],
        custom: Sequence[str] = (),
    ) -> Forked:
        told, tell = os.pipe()
        asked = {"command": list(args), "environment": dict(env), "folder": os.getcwd(), "custom": list(custom)}
        content = json.dumps(asked).encode()
        try:
            with self._lock:
                self._begin(role)
                asking = self._asking[role]
                with self._locked():
                    socket.send_fds(asking, [LENGTH.pack(len(content))], [*files, tell])
                    asking.sendall(content)
                    answer = asking.recv(STATUS.size)
        finally:
            os.close(tell)
        forked = Forked(args, int(STATUS.unpack(answer)[0]) if answer else 0, told)
        if not answer:
            raise RuntimeError(f"the process that each {role} is forked from has ended")
        return forked

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        fcntl.flock(self._lock_file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._lock_file, fcntl.LOCK_UN)

    def _begin(self, role: str) -> None:
        """Starts the zygote of a role, those of all services at once, because each takes time and usually all are
        needed."""
        needed = {CHILD} if role == CHILD else {*SERVICES, role}
        for name in sorted(needed - self._asking.keys(), key=lambda name: name == COMMAND):
            self._asking[name], other = socket.socketpair()
            shared = {one: self._asking[one].fileno() for one in SERVICES} if name == COMMAND else {}
            with other:
                words = ["quire", name]  # by which tools know a service, whose command line this becomes
                command = [sys.executable, "-m", "tests.preloaded.zygote", str(other.fileno()), *words]
                environment = {**self._environments[name], "PYTHONPATH": python_path()}
                if shared:
                    environment[SHARED] = json.dumps({"sockets": shared, "lock": self._lock_file.name})
                options: Any = {"env": environment, "pass_fds": [other.fileno(), *shared.values()]}
                self._processes.append(subprocess.Popen(command, **options, cwd=ROOT, start_new_session=True))

    def _end(self) -> None:
        for asking in self._asking.values():
            asking.close()
        for process in self._processes[::-1]:
            process.wait()
        self._lock_file.close()


def of_python(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith("PYTHON")}


def lasting(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the environment without variables that change between starts and that no import reads."""
    return {name: value for name, value in environment.items() if not name.startswith(OF_ONE_START)}
