"""Names of several processes on one machine."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.shared.process.runtime_folder import RUNTIME_VARIABLE
from quire.shared.process.unique_name import with_unique_name
from quire.shared.settings import SchedulerSettings, WorkerSettings

DEFAULT = f"scheduler-{socket.gethostname()}"
HOLDER = """
from quire.shared.process.unique_name import with_unique_name
from quire.shared.settings import SchedulerSettings
with with_unique_name(SchedulerSettings()) as settings:
    print(settings.name, flush=True)
    input()
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, str(tmp_path))


@contextlib.contextmanager
def another_process() -> Iterator[str]:
    """Yields the name of another process while it runs."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.kill()


def own_name() -> str:
    with with_unique_name(SchedulerSettings()) as settings:
        return settings.name


def test_each_process_of_a_service_has_a_name_of_its_own_and_takes_a_free_one_again() -> None:
    with another_process() as first:
        with another_process() as second:
            assert [first, second, own_name()] == [DEFAULT, f"{DEFAULT}-2", f"{DEFAULT}-3"]
        assert own_name() == f"{DEFAULT}-2"
    assert own_name() == DEFAULT


def test_another_service_and_a_name_that_was_given_stay_as_they_are() -> None:
    with (
        another_process(),
        with_unique_name(SchedulerSettings(id="east")) as named,
        with_unique_name(WorkerSettings(model="m")) as worker,
    ):
        assert [named.name, worker.name] == ["east", f"worker-{socket.gethostname()}"]


def test_a_name_without_a_number_is_taken_where_there_is_no_folder_to_agree_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RUNTIME_VARIABLE, "/proc/no/such")
    assert own_name() == DEFAULT
