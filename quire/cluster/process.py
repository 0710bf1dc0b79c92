"""One supervised child process: start, readiness, restart, stop."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from quire.cluster import installation
from quire.cluster.options import RedisSpec, ServiceSpec, Spec
from quire.cluster.reasons import log_entry, possible_reason, reason_of
from quire.cluster.restarts import Restarts
from quire.shared import logs
from quire.shared.process import allocator
from quire.shared.process.lifecycle import PARENT_PIPE_VARIABLE

ROOT = Path(__file__).resolve().parents[2]

MAX_LAST_LINES = 3
MAX_LINE_CHARACTERS = 1_000
SAID_WITHIN_S = 1.0  # after its end; its descendants may keep its stderr open

STDERR = 2
OF_A_LINE = {"time", "level", "service", "logger", "message", "role"}

Report = Callable[[str], None]

launch: Callable[..., subprocess.Popen[str]] = subprocess.Popen  # starts a process; replaced in tests


class ServiceProcess:
    """A child process. Its stdin is a pipe held by this process: when this process dies, the child sees the end and
    exits."""

    def __init__(self, spec: Spec, report: Report, log: IO[Any] | None) -> None:
        self.spec = spec
        self.addresses: dict[str, str] = {}
        self.ready = threading.Event()
        self.restarts = 0
        self._is_json = isinstance(spec, ServiceSpec) and spec.flags.get("log_format") == "json"
        self._report = report
        self._log = log
        self._process: subprocess.Popen[str] | None = None
        self._hearing = threading.Lock()  # protects the current process and its readiness
        self._pauses = Restarts()
        self._restart_at = 0.0
        self._last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)  # of stderr, empty where they are no reason
        self._error_reader: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def exit_status(self) -> int | None:
        return self._process.poll() if self._process is not None else None

    @property
    def reason(self) -> str:
        """Returns why the process ended, from its stderr: the line with which a service refuses to start, otherwise
        its last lines (a traceback, a library's abort message) without ordinary log lines; empty without any."""
        if self._error_reader is not None:
            self._error_reader.join(SAID_WITHIN_S)
        return reason_of(self._last_lines)

    def start(self) -> None:
        """Starts the process in a session of its own, with threads that read its output and wait for its readiness.
        `ready` is cleared first; raises OSError if the process cannot be started."""
        own = {**allocator.environment(self.spec.role, os.environ), **self.spec.environment()}
        environment = {**os.environ, **own, PARENT_PIPE_VARIABLE: "1", "PYTHONPATH": python_path()}
        process = launch(
            self.spec.command(),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if isinstance(self.spec, RedisSpec) else subprocess.PIPE,  # otherwise it is read
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # undecodable output must not end the reader thread
            env=environment,
            start_new_session=True,  # the launcher forwards Ctrl-C, once
        )
        with self._hearing:
            self.ready.clear()  # before the new process becomes visible; a ready line of the old one must not count
            self._process = process
        lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        self._last_lines = lines
        self._error_reader = threading.Thread(target=self._pass_on, args=(process, lines), daemon=True)
        self._error_reader.start()
        hear = self._await_socket if isinstance(self.spec, RedisSpec) else self._listen
        threading.Thread(target=hear, args=(process,), daemon=True).start()

    def watch(self, now: float) -> None:
        """Schedules a restart if the process died, and restarts it when its pause is over; called periodically with
        monotonic seconds. Raises OSError if the start fails."""
        if self.running:
            return
        if self._restart_at == 0.0:
            pause_s = self._pauses.pause_s(now, was_ready=self.ready.is_set())
            self._restart_at = now + pause_s
            reason = f": {self.reason}" if self.exit_status and self.reason else ""
            self._report(f"{self.spec.id} ended with status {self.exit_status}{reason}; restarting in {pause_s:g} s")
        elif now >= self._restart_at:
            self._restart_at = 0.0
            self._close_pipe()
            self.start()
            self.restarts += 1  # visible only together with the new process, which is not ready yet

    def signal(self, number: int) -> None:
        if self._process is not None and self.running:
            self._process.send_signal(number)

    def wait(self, timeout_s: float) -> bool:
        """Returns whether the process has ended within the time."""
        if self._process is None:
            return True
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def close(self) -> None:
        """Kills the process, waits for its end and last log lines, and closes its pipe."""
        if self._process is None:
            return
        if self.running:
            self._process.kill()
        self._process.wait()
        if self._error_reader is not None:
            self._error_reader.join(SAID_WITHIN_S)  # to get the last lines of its log
        self._close_pipe()

    def _close_pipe(self) -> None:
        """Closes the stdin pipe. stdout and stderr are left to their reader threads, which may be blocked in a read
        because descendants of the process still hold the other end."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()

    def _listen(self, process: subprocess.Popen[str]) -> None:
        """Reads stdout in a thread; the ready announcement sets `addresses` and `ready`, unless the process has been
        replaced meanwhile."""
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                addresses = announced(line, self.spec.role)
                with self._hearing:
                    if addresses and process is self._process:
                        self.addresses = addresses
                        self.ready.set()

    def _pass_on(self, process: subprocess.Popen[str], last: deque[str]) -> None:
        """Copies stderr to the log until its end, keeping the last lines."""
        assert process.stderr is not None
        with process.stderr:
            for line in process.stderr:
                if line.strip():
                    last.append(possible_reason(line)[:MAX_LINE_CHARACTERS])
                with contextlib.suppress(OSError, ValueError):  # disk full, or closed by its owner
                    _write(STDERR if self._log is None else self._log.fileno(), self._as_logged(line))

    def _as_logged(self, line: str) -> str:
        """Converts a line of a traceback or a library to JSON if the log is JSON."""
        if not self._is_json or not line.strip() or log_entry(line) is not None:
            return line
        return logs.as_json(self.spec.id, line.rstrip("\n"), level="warning", logger="stderr") + "\n"

    def _await_socket(self, process: subprocess.Popen[str]) -> None:
        """Waits until Redis accepts connections, because it announces nothing."""
        assert isinstance(self.spec, RedisSpec)
        while process.poll() is None:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(str(self.spec.socket)) == 0:
                    self.addresses = {"redis": str(self.spec.socket)}
                    self.ready.set()
                    return
            time.sleep(0.02)


def _write(descriptor: int, line: str) -> None:
    data = line.encode(errors="backslashreplace")
    while data:
        data = data[os.write(descriptor, data) :]


def announced(line: str, role: str) -> dict[str, str]:
    """Parses a service's ready line, `quire-<role> ready id=... kind=HOST:PORT ...` or its JSON form; empty for any
    other line."""
    if line.startswith("{"):
        with contextlib.suppress(ValueError):
            values = json.loads(line)
            if values.get("message") == "ready" and values.get("role") == role:
                return {name: value for name, value in values.items() if name not in OF_A_LINE}
    words = line.split()
    if words[:2] != [f"quire-{role}", "ready"]:
        return {}
    return dict(word.split("=", 1) for word in words[2:])


def python_path() -> str:
    """Returns PYTHONPATH for child processes: unchanged if they import this copy of the package anyway, because it
    is installed; otherwise with its parent folder first."""
    folders = [] if installation.is_installed() else [str(ROOT)]
    folders += filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join(dict.fromkeys(folders))
