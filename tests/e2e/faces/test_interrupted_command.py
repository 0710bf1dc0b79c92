"""Ctrl-C and SIGTERM at any moment of a command's start: no output and no remaining process. Tests count from the first
import of the package, as Python itself prints a traceback for interrupts before it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire import bundled

QUIET = {f"QUIRE_{service}_LOG_LEVEL": "error" for service in ("FRONTEND", "SCHEDULER", "WORKER")}
UP = ("up", "--http-port", "0", "--grpc-port", "0", "--num-blocks", "300")
MARK = "TEST_MARK"
GONE_S = 60.0  # until then nothing of it may be left, on whatever machine

OWN = ("quire", "quire.interrupts")  # what is imported before anything can be said

# What pip writes for the command, and before it a finder that finds nothing and does something once, at the import of
# `first` or, if that is None, of the first module behind OWN.
SCRIPT = """\
import sys
class Finder:
    asked = []
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        cls.asked.append(name)
        if name == {first!r} or len(cls.asked) == {behind}:
            {then}
sys.meta_path.insert(0, Finder)
from quire.cli.main import main
if __name__ == '__main__':
    sys.exit(main())
"""
SAY_SO = "print(flush=True)"


def written(folder: Path, *, then: str, first: str | None = None) -> list[str]:
    script = folder / "quire"
    behind = len(OWN) + 1 if first is None else None
    script.write_text(SCRIPT.format(first=first, then=then, behind=behind))
    return [sys.executable, str(script)]


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Starts a command that receives signals as from a terminal, even if the test runner ignores them."""
    environment: Mapping[str, str] = {**os.environ, **QUIET, MARK: uuid.uuid4().hex}
    hearing = ["env", "--default-signal=INT", *command]
    process = subprocess.Popen(hearing, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield process
        assert not left(environment[MARK])
    finally:
        process.kill()
        process.communicate()


def left(mark: str) -> list[str]:
    """Command lines of processes that have inherited the marker and have not ended."""
    end_s = time.monotonic() + GONE_S
    while (there := list(marked(mark))) and time.monotonic() < end_s:
        time.sleep(0.05)
    return there


def marked(mark: str) -> Iterator[str]:
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (process / "environ").read_bytes():
                yield (process / "cmdline").read_text().replace("\0", " ")
        except OSError:  # it has ended, or belongs to another user
            continue


def interrupt(command: Sequence[str], number: signal.Signals, delay_s: float) -> None:
    with started(command) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay_s)
        process.send_signal(number)
        _, errors = process.communicate(timeout=GONE_S)
        assert errors == "", delay_s
        assert process.returncode in {0, 130, 128 + number, -number}, delay_s


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_start_can_be_interrupted_without_output(tmp_path: Path, number: signal.Signals) -> None:
    command = written(tmp_path, then=SAY_SO)
    for delay_s in (0.0, 0.1, 0.3, 1.5):
        interrupt([*command, *UP], number, delay_s)


# Ended by nothing else: what they wait for, at SILENT, neither answers nor refuses.
SILENT = "SILENT"
SERVE = ("frontend", "--model", str(bundled.FOLDER), "--schedulers", SILENT, "--http-port", "0", "--grpc-port", "0")


@pytest.mark.slow
@pytest.mark.parametrize("words", [UP, ("demo",), SERVE, ("chat", "--address", SILENT), ("version",)])
def test_at_any_moment_of_any_command(tmp_path: Path, words: Sequence[str]) -> None:
    command = written(tmp_path, then=SAY_SO)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        words = [address if word == SILENT else word for word in words]
        for delay_ms in range(0, 410, 20):
            interrupt([*command, *words], signal.SIGINT, delay_ms / 1000)


def test_nothing_is_imported_before_a_command_may_be_interrupted(tmp_path: Path) -> None:
    """Neither by the package nor by its imports."""
    show = "before = list(cls.asked); import signal; print(*before, int(signal.getsignal(signal.SIGINT))); sys.exit()"
    command = written(tmp_path, then=show)
    with started([*command, "version"]) as process:
        seen, errors = process.communicate(timeout=GONE_S)
    assert errors == ""
    assert tuple(seen.split()[:2]) == OWN
    assert seen.split()[3:] == [str(int(signal.SIG_DFL))]


def test_python_dash_m_is_the_command_too() -> None:
    command = [sys.executable, "-c", "import runpy, sys; sys.argv = ['-m', 'version'];"]
    command[-1] += "sys.orig_argv = ['python', '-m', 'quire', 'version'];"
    command[-1] += "from quire import interrupts; import signal; print(interrupts.IS_COMMAND, signal.getsignal(2).name)"
    with started(command) as process:
        assert process.communicate(timeout=GONE_S) == ("True SIG_DFL\n", "")


@pytest.mark.parametrize("handler", ["signal.default_int_handler", "signal.SIG_IGN"])
def test_a_program_that_imports_the_package_keeps_its_own_way_with_interrupts(handler: str) -> None:
    script = f"import signal; signal.signal(2, {handler}); import quire; print(signal.getsignal(2) == {handler})"
    with started([sys.executable, "-c", script]) as process:
        assert process.communicate(timeout=GONE_S) == ("True\n", "")


def test_command_with_ignored_interrupts_continues(tmp_path: Path) -> None:
    """As under nohup, or after a shell's `&`."""
    ignore = "import signal; print(int(signal.getsignal(2)), flush=True); sys.exit()"
    command = written(tmp_path, then=ignore)
    done = subprocess.run(
        ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command, "version"], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("1\n", "")


def test_an_interrupt_is_one_wherever_it_meets_an_import(tmp_path: Path) -> None:
    """Python 3.11 converts what a class's __set_name__ raises to a RuntimeError."""
    named = (
        "Named = type('Named', (), {'__set_name__': lambda *_: __import__('os').kill(__import__('os').getpid(), 2)})"
    )
    command = written(tmp_path, first="quire.cli.up", then=f"{named}; type('Owner', (), {{'member': Named()}})")
    with started([*command, "up"]) as process:
        assert (*process.communicate(timeout=GONE_S), process.returncode) == ("", "", -signal.SIGINT)
