"""Log lines: one per event, whatever its values, without waiting for readers."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest
import trustme

from quire.shared import logs


@contextmanager
def configured(stream: TextIO, style: logs.LogFormat = "text", max_lines: int = logs.MAX_LINES) -> Iterator[None]:
    """Logs of this process go to `stream` temporarily."""
    root = logging.getLogger()
    before, level, stderr = root.handlers[:], root.level, sys.stderr
    hook = sys.excepthook
    sys.stderr = stream
    try:
        logs.configure("me", style=style, max_lines=max_lines)
        yield
    finally:
        sys.stderr, sys.excepthook = stderr, hook
        logging.captureWarnings(False)
        for handler in root.handlers:
            handler.close()
        root.handlers[:] = before
        root.setLevel(level)


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("plain", "plain"),
        ("Malmö", "Malmö"),
        ("a b", '"a b"'),
        ("status=200", '"status=200"'),
        ('say "no"', '"say \\"no\\""'),
        ("two\nlines", '"two\\nlines"'),
        ("\ud800", '"\\ud800"'),
        ("\x1b[31m", '"\\u001b[31m"'),
        (7, "7"),
    ],
)
def test_a_value_stays_one_value_on_one_line(value: object, written: str) -> None:
    stream = io.StringIO()
    with configured(stream):
        logs.logger("x").info("said", before=1, value=value, nothing=None, after=2)
        logs.flush()
    line = stream.getvalue()
    assert line.endswith(f" I me said before=1 value={written} after=2\n")
    assert line.count("\n") == 1


def test_json_has_the_same_values() -> None:
    stream = io.StringIO()
    with configured(stream, "json"):
        logs.logger("x").info("said", value="two\nlines \ud800")
        logs.flush()
    entry = json.loads(stream.getvalue())
    assert (entry["message"], entry["service"], entry["value"]) == ("said", "me", "two\nlines \ud800")


def test_nobody_waits_for_a_reader_that_stands_still() -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb") as reader, configured(pipe, max_lines=1000):
        done = threading.Event()

        def talk() -> None:
            for number in range(5000):  # far more than the pipe and the queue hold
                logs.logger("x").info("said", number=number, much="x" * 100)
            done.set()

        threading.Thread(target=talk, daemon=True).start()
        assert done.wait(30), "a full pipe holds up whoever logs"
        first = reader.readline()
        while b"were dropped" not in reader.readline():
            pass
        logs.flush()
    assert b"number=0 " in first


class Disk(io.RawIOBase):
    """Stream with room for a limited number of bytes."""

    def __init__(self, room: int) -> None:
        self.room, self.written = room, b""

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        taken = bytes(data)[: self.room]  # type: ignore[call-overload]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        self.written += taken
        return len(taken)


def test_a_full_disk_that_has_room_again_has_lines_again() -> None:
    disk = Disk(room=50)
    with configured(io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=True)):
        for _ in range(3):
            logs.logger("x").info("said", much="x" * 100)
            logs.flush()
        disk.room = 10**6
        logs.logger("x").info("at last")
        logs.flush()
    torn, *lines = disk.written.decode().splitlines()
    assert len(torn) == 50
    assert [line[12:] for line in lines[:1]] == [" I me at last"]
    assert lines[1][12:].startswith(" W me 3 log lines were dropped reason=")
    assert len(lines) == 2


def test_what_is_said_to_a_pipe_without_a_reader_ends_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        logs.print_line("ready", pipe)  # and closing it raises nothing: no byte of it was kept


class Fickle(io.StringIO):
    """Stream that fails with unusual errors a given number of times."""

    failures = 1

    def write(self, text: str) -> int:
        if self.failures:
            self.failures -= 1
            raise LookupError("unknown encoding")
        return super().write(text)


@pytest.mark.parametrize("style", ["text", "json"])
def test_an_exception_of_the_writer_ends_no_logging(style: logs.LogFormat) -> None:
    stream = Fickle()
    with configured(stream, style):
        for message in ("lost", "kept"):
            logs.logger("x").info(message)
            logs.flush()
    kept, told = stream.getvalue().splitlines()
    assert "kept" in kept
    assert "1 log lines were dropped" in told
    assert "unknown encoding" in told


class Unprintable:
    """A value whose conversion to text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("style", ["text", "json"])
def test_a_line_that_cannot_be_formatted_is_named_in_one_line(style: logs.LogFormat) -> None:
    stream = io.StringIO()
    with configured(stream, style):
        logs.logger("x").info("said", value=Unprintable())
        logs.logger("x").info("after it")
        logs.flush()
    named, after = stream.getvalue().splitlines()
    assert "a log line cannot be formatted" in named
    assert "no text" in named
    assert "after it" in after


UNCAUGHT = """
import warnings
from quire.shared import logs
logs.configure("me", style="json")
warnings.warn("old")
raise RuntimeError("a fault")
"""


def test_warnings_and_what_ends_a_process_are_json_and_have_their_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, check=False)
    warned, fault = map(json.loads, done.stderr.splitlines())
    assert done.returncode == 1
    assert (warned["level"], fault["level"]) == ("warning", "critical")
    assert "old" in warned["message"]
    assert fault["exception"].startswith("Traceback (most recent call last):")
    assert fault["exception"].endswith("RuntimeError: a fault")


def test_every_line_of_a_service_is_json_whatever_comes_to_its_tls_port(tmp_path: Path) -> None:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(tmp_path / "key")
    issued.cert_chain_pems[0].write_to_path(tmp_path / "cert")
    (tmp_path / "key").chmod(0o600)
    tls = f"cert={tmp_path / 'cert'},key={tmp_path / 'key'}"
    flags = ["--log-format", "json", "--grpc-port", "0", "--metrics-port", "0", "--tls", tls, "--admin-port", "0"]
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_VERBOSITY"}
    service = subprocess.Popen(
        [sys.executable, "-m", "quire", "scheduler", *flags],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert service.stdout is not None
        host, _, port = json.loads(service.stdout.readline())["grpc"].rpartition(":")
        for greeting in (b"GET / HTTP/1.0\r\n\r\n", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"\x16\x03\x01\x00\x05hello"):
            with socket.create_connection((host, int(port)), timeout=60) as client:
                client.sendall(greeting)
                while client.recv(4096):
                    pass
    finally:
        service.terminate()
        _, written = service.communicate(timeout=60)
    assert [line for line in written.splitlines() if not line.startswith("{")] == []
    assert "ssl" not in written.lower()
