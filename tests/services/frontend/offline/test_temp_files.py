"""Tests that temporary files of a frontend are swept when the next one starts in its folder, and only after its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore
from quire.services.frontend.offline.temp_files import TempFiles

ANOTHER = """
import sys
from pathlib import Path
from quire.services.frontend.offline.files import FileStore
store = FileStore(Path(sys.argv[1]), 1 << 20, 1 << 20)
scratch = store.temp_path()
scratch.write_text("half of")
print(scratch, flush=True)
sys.stdin.read()
"""


@contextmanager
def another(folder: Path) -> Iterator[tuple[Path, subprocess.Popen[str]]]:
    """Yields a process in the middle of an upload, and the path of its temporary file."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", ANOTHER, str(folder)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip()), process
        process.kill()


def test_files_of_an_ended_frontend_are_swept_and_those_of_a_running_one_stay(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    with another(folder) as (left, dead), another(folder) as (whole, _):
        dead.kill()
        dead.wait()
        assert left.exists()
        store = FileStore(folder, 1 << 20, 1 << 20)
        assert not left.exists()
        assert whole.read_text() == "half of"
        assert len([*Path(f"{folder}.owners").iterdir()]) == 2, "it, and who lives"
        kept = store.store(whole, "", "a", "batch")
    TempFiles(folder)
    assert store.path(kept.id, "").read_text() == "half of"


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_temporary_files_of_batches_are_swept_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = BatchStore(tmp_path / "batches")
    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.create("", "", endpoint="/v1/completions", input_file_id="f", metadata=None)
    assert [*tmp_path.glob("batches/*.part")]
    del store
    BatchStore(tmp_path / "batches")
    assert not [*tmp_path.glob("batches/*.part")]


def test_an_unwritable_folder_is_not_swept_and_raises_no_error(tmp_path: Path) -> None:
    folder = tmp_path / "nowhere" / "files"
    assert TempFiles(folder).new().parent == folder
