"""The part of subprocess.Popen that callers need, for a process that a zygote has forked."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from typing import IO, Any

from tests.preloaded.zygote import STATUS


class Forked:
    """A forked process; its exit status arrives through a pipe, which is open until this object is gone, so that
    several threads may wait for it."""

    def __init__(
        self,
        args: Sequence[str],
        pid: int,
        status: int,
        stdin: IO[Any] | None = None,
        stdout: IO[Any] | None = None,
        stderr: IO[Any] | None = None,
    ) -> None:
        self.args, self.pid, self.stdin, self.stdout, self.stderr = args, pid, stdin, stdout, stderr
        self.returncode: int | None = None
        self._status, self._lock = status, threading.Lock()

    def __del__(self) -> None:
        os.close(self._status)

    def poll(self) -> int | None:
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        ends_s = None if timeout is None else time.monotonic() + timeout
        while (status := self._look(None if ends_s is None else max(0.0, ends_s - time.monotonic()))) is None:
            if ends_s is not None and time.monotonic() >= ends_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def communicate(self) -> tuple[Any, None]:
        """Closes stdin, returns the rest of stdout, and waits for the end."""
        if self.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.stdin.close()
        rest = None
        if self.stdout is not None and not self.stdout.closed:
            rest = self.stdout.read()
            self.stdout.close()
        self.wait()
        return rest, None

    def _look(self, patience_s: float | None) -> int | None:
        """Returns the exit status, after waiting at most `patience_s` for it, or without a limit."""
        if self.returncode is None and self._is_told(patience_s):
            with self._lock:
                if self.returncode is None:
                    self.returncode = STATUS.unpack(os.read(self._status, STATUS.size))[0]
        return self.returncode

    def _is_told(self, patience_s: float | None) -> bool:
        waiting = select.poll()
        waiting.register(self._status, select.POLLIN)
        return bool(waiting.poll(None if patience_s is None else 1000 * patience_s))
