"""A process of a service's own that answers messages, one after the other: for what could hold up everything else.

stdin: an introduction, then messages; stdout: an empty message when it has begun, then an answer for each. All of them
with their length in front, 4 bytes, little-endian. It ends with its stdin. What it says on stderr until it has begun is
told if it does not.
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
LONGEST_WAIT_S = 60.0  # for an answer, on a machine that has much to do
LONGEST_START_S = 300.0  # for its imports, of seconds: there it gets what others leave of the processors
LAST_WORDS_BYTES = 4096  # the end of what it has said


class ChildEnded(Exception):
    """It has ended instead of answering, or had to be ended."""

    def __init__(self, status: int | None) -> None:
        """`status`: as of subprocess; None of one that gave no answer."""
        super().__init__(f"status {status}")
        self.status = status


class Child:
    """Started when it is first asked and after each time that it has ended; for one thread at a time."""

    def __init__(self, module: str, introduction: bytes) -> None:
        self._command = [sys.executable, "-P", "-m", module]
        self._introduction = introduction
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Before the first question, which else does it. Internal if that is not possible."""
        if self._process is None:
            self._start()

    def ask(self, message: bytes, longest_s: float | None = None) -> bytes:
        """Its answer; ChildEnded, also after `longest_s`. Internal if it cannot be started."""
        process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write(process.stdin, message)
        except BrokenPipeError:  # it has been killed from outside while nobody asked
            self.close()
            return self.ask(message, longest_s)
        ready, _, _ = select.select([process.stdout], [], [], LONGEST_WAIT_S if longest_s is None else longest_s)
        answer = read(process.stdout) if ready else None
        if answer is not None:
            return answer
        status = process.wait() if ready else None
        self.close()
        raise ChildEnded(status)

    def close(self) -> None:
        """Ends the process. Its owner may call this while another thread asks: each process is ended once."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()

    def __del__(self) -> None:
        """Ends the process of an owner that was never closed."""
        self.close()

    def _start(self) -> subprocess.Popen[bytes]:
        with tempfile.TemporaryFile() as words:
            pipe = subprocess.PIPE
            process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, stderr=words)
            assert process.stdin is not None
            assert process.stdout is not None
            self._process = process
            # Reaps one that is killed while nothing is asked: else it would stay defunct until the next question.
            threading.Thread(target=process.wait, name="reaper", daemon=True).start()
            with contextlib.suppress(BrokenPipeError):  # it is dead, and nothing will be read
                write(process.stdin, self._introduction)
            ready, _, _ = select.select([process.stdout], [], [], LONGEST_START_S)
            if not ready or read(process.stdout) is None:
                how = f"ended with status {process.wait()}" if ready else f"says nothing for {LONGEST_START_S:g} s"
                self.close()
                raise Internal(f"the process {self._command[-1]} does not start: it {how}{_last_of(words)}")
        return process


def _last_of(words: IO[bytes]) -> str:
    """The last line in it; of a traceback that is the error."""
    words.seek(max(0, words.seek(0, os.SEEK_END) - LAST_WORDS_BYTES))
    lines = [line.strip() for line in words.read().decode(errors="replace").splitlines()]
    last = next((line for line in reversed(lines) if line), "")
    return f": {last}" if last else ""


def write(stream: IO[bytes], message: bytes) -> None:
    stream.write(len(message).to_bytes(LENGTH_BYTES, "little") + message)
    stream.flush()


def read(stream: IO[bytes]) -> bytes | None:
    """None at the end."""
    length = stream.read(LENGTH_BYTES)
    return stream.read(int.from_bytes(length, "little")) if length else None


def serve_requests(begin: Callable[[bytes], Callable[[bytes], bytes]]) -> None:
    """What such a process does, until its stdin ends; it leaves the processors to its parent. `begin`: from the
    introduction to what answers messages."""
    lower_priority(os.getppid())  # once, though the thread that has started it may have stepped back itself
    answer = begin(read(sys.stdin.buffer) or b"")
    _say_no_more()
    write(sys.stdout.buffer, b"")
    while (message := read(sys.stdin.buffer)) is not None:
        write(sys.stdout.buffer, answer(message))


def _say_no_more() -> None:
    """Nobody reads it from now on, and nobody would bound it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)
