"""Child processes that answer messages, or fail to start."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from quire.shared.errors import Internal
from quire.shared.process.child import Child
from quire.shared.process.priority import lower_priority
from tests import waiting
from tests.priorities import has_stepped_back

MORE_THAN_A_PIPE_HOLDS = bytes(1 << 20)
ECHO = """
import os, sys
from quire.shared.process.child import serve_requests
sys.stderr.write("beginning")
def begin(introduction):
    def answer(message):
        os.write(2, bytes(1 << 20))
        return introduction + message
    return answer
serve_requests(begin)
"""

Make = Callable[[str], str]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    """Its name, for a process that is started with what it says."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))

    def made(text: str) -> str:
        (tmp_path / "a_child.py").write_text(text)
        return "a_child"

    return made


@pytest.mark.parametrize("introduction", [b"", MORE_THAN_A_PIPE_HOLDS], ids=["small", "larger than a pipe"])
@pytest.mark.parametrize(
    ("program", "told"),
    [
        ("import sys; sys.exit('no room for this')", "it ended with status 1: no room for this"),
        ("import not_there", "it ended with status 1: ModuleNotFoundError: No module named 'not_there'"),
        ("import os; os.kill(os.getpid(), 9)", "it ended with status -9"),
    ],
)
def test_one_that_dies_before_it_has_begun_is_told_with_its_last_words(
    module: Make, program: str, told: str, introduction: bytes
) -> None:
    child = Child(module(program), introduction)
    with pytest.raises(Internal) as refused:
        child.start()
    assert refused.value.message == f"the process a_child does not start: {told}"
    assert child.pid is None


def test_what_it_says_later_is_nobodys(module: Make) -> None:
    child = Child(module(ECHO), b"a")
    assert [child.ask(b"b"), child.ask(b"c")] == [b"ab", b"ac"]
    child.close()


def test_one_that_a_thread_in_the_background_starts_steps_back_no_further(module: Make) -> None:
    child = Child(module(ECHO), b"a")

    def start() -> None:
        lower_priority()
        child.start()

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert child.pid is not None
    assert has_stepped_back(child.pid)
    child.close()


@pytest.mark.parametrize("is_asked_before", [False, True])
def test_one_that_is_killed_while_nothing_is_asked_is_reaped_and_started_anew(
    module: Make, is_asked_before: bool
) -> None:
    with contextlib.closing(Child(module(ECHO), b"x")) as child:
        child.start()
        if is_asked_before:
            assert child.ask(b"y") == b"xy"
        pid = child.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        waiting.until(lambda: not Path(f"/proc/{pid}").exists())
        assert child.ask(b"z") == b"xz"
        assert child.pid != pid
