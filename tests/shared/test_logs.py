"""Lines of the log: one for each event, whatever is in it, and nobody waits for whoever reads them."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import pytest

from shared import logs


@contextmanager
def configured(stream: TextIO, style: logs.LogFormat = "text") -> Iterator[None]:
    """This process logs to `stream`, for a while."""
    root = logging.getLogger()
    before, level, stderr = root.handlers[:], root.level, sys.stderr
    sys.stderr = stream
    try:
        logs.configure("me", style=style)
        yield
    finally:
        sys.stderr = stderr
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


def test_nobody_waits_for_a_reader_that_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "MOST_LINES", 1000)
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe, os.fdopen(reading, "rb") as reader, configured(pipe):
        done = threading.Event()

        def talk() -> None:
            for number in range(5000):  # far more than the pipe and the queue hold
                logs.logger("x").info("said", number=number, much="x" * 100)
            done.set()

        threading.Thread(target=talk, daemon=True).start()
        assert done.wait(30), "a full pipe holds up whoever logs"
        first = reader.readline()
        while b"left out" not in reader.readline():
            pass
        logs.flush()
    assert b"number=0 " in first


class Disk(io.RawIOBase):
    """Has room for so many bytes."""

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
    assert lines[1].startswith("3 lines of the log were left out")
    assert len(lines) == 2


def test_what_is_said_to_a_pipe_without_a_reader_ends_nobody() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as pipe:
        logs.say("ready", pipe)  # and closing it raises nothing: no byte of it was kept
