"""Runs work that could block or crash in a child process that answers messages one at a time.

stdin carries an introduction, then messages; stdout an empty message when the child is ready, then one answer per
message. Each is preceded by its length in 4 bytes, little-endian. The child exits when its stdin ends. What it
writes to stderr before it is ready is reported if it fails to start.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from typing import IO

from quire.shared.errors import Internal
from quire.shared.process.priority import lower_priority

LENGTH_BYTES = 4
# Children work one beside the other; threads of numpy's products in each would only wait for each other.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
MAX_WAIT_S = 60.0  # for an answer, on a busy machine
LONGEST_START_S = 300.0  # for its imports, which take seconds, at low priority on a busy machine
LAST_OUTPUT_BYTES = 4096  # end of the output that is reported

launch: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen  # starts a process; replaced in tests


class ChildEnded(Exception):
    """The child exited, or was killed, instead of answering."""

    def __init__(self, status: int | None) -> None:
        """`status`: exit status as of subprocess; None if it was killed for not answering."""
        super().__init__(f"status {status}")
        self.status = status


class Child:
    """A child process, started at the first message and after each exit; used by one thread at a time."""

    def __init__(self, module: str, introduction: bytes) -> None:
        self._command = [sys.executable, "-P", "-m", module]
        self._introduction = introduction
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts the process now instead of at the first message. Raises Internal if that fails."""
        if self._process is None:
            self._start()

    def ask(self, message: bytes, longest_s: float | None = None) -> bytes:
        """Sends a message and returns the answer; starts the process if it does not run, and again if it was killed
        while idle. Raises ChildEnded if the child exits or does not answer within `longest_s` (it is killed then),
        Internal if it cannot be started."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write(process.stdin, message)
        except BrokenPipeError:  # it was killed from outside while idle
            self.close()
            return self.ask(message, longest_s)
        ready, _, _ = select.select([process.stdout], [], [], MAX_WAIT_S if longest_s is None else longest_s)
        answer = read(process.stdout) if ready else None
        if answer is not None:
            return answer
        status = process.wait() if ready else None
        self.close()
        raise ChildEnded(status)

    def close(self) -> None:
        """Kills the process. May be called while another thread waits for an answer; each process is killed once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        """Kills the process of an owner that did not close it."""
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        """Starts the process, sends the introduction and waits until it is ready. Raises Internal, with the last
        line of its stderr, if it exits or is not ready after LONGEST_START_S."""
        with tempfile.TemporaryFile() as words:
            pipe = subprocess.PIPE
            process = launch(self._command, stdin=pipe, stdout=pipe, stderr=words, env={**ONE_THREAD, **os.environ})
            assert process.stdin is not None
            assert process.stdout is not None
            self._process = process
            # Reaps a child that is killed while idle, which would otherwise stay a zombie until the next message.
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()
            with contextlib.suppress(BrokenPipeError):  # it has exited; the read below reports it
                write(process.stdin, self._introduction)
            ready, _, _ = select.select([process.stdout], [], [], LONGEST_START_S)
            if not ready or read(process.stdout) is None:
                how = f"ended with status {process.wait()}" if ready else f"is not ready after {LONGEST_START_S:g} s"
                self.close()
                raise Internal(f"the process {self._command[-1]} does not start: it {how}{_last_of(words)}")
        return process


def _last_of(words: IO[bytes]) -> str:
    """Returns the last line of the output; for a traceback that is the error."""
    words.seek(max(0, words.seek(0, os.SEEK_END) - LAST_OUTPUT_BYTES))
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f": {last}" if last else ""


def write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """Returns the next message; None at the end of the stream."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "little")) if length else None


def serve_requests(begin: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """Runs the child's side until stdin ends, at lower CPU priority than the parent. `begin`: maps the introduction
    to the function that answers messages."""
    lower_priority(
        os.getppid()
    )  # relative to the parent process, because the starting thread may have a lower priority already
    answer = begin(read(sys.stdin.buffer) or b"")
    _discard_stderr()
    write(sys.stdout.buffer, b"")
    while (message := read(sys.stdin.buffer)) is not None:
        write(sys.stdout.buffer, answer(message))


def _discard_stderr() -> None:
    """Redirects stderr to /dev/null, because it is no longer read and would be unbounded."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)
