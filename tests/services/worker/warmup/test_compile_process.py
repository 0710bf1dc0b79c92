"""A process started before the worker imports torch compiles the kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import bundled
from quire.kernels.triton.precompile import precompile
from quire.services.worker.warmup import compile_process
from quire.services.worker.warmup.build_kernels import KernelCompilation, missing
from quire.services.worker.warmup.compile_process import cache_folder, start
from quire.shared.settings import WorkerSettings
from tests.waiting import has_ended, until

ECHO = "echo"  # a module that a fixture writes, in place of the compiler


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with a GPU and no compiled kernels."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(precompile, "device_capability", lambda: 90)


@pytest.fixture
def settings() -> WorkerSettings:
    return WorkerSettings(model=str(bundled.FOLDER), device="cuda", threads=8)


@pytest.fixture
def received_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Input of the compile process, recorded by a fake module."""
    received_settings = tmp_path / "received_settings"
    (tmp_path / "echo.py").write_text(
        f"import pathlib, sys\npathlib.Path({str(received_settings)!r}).write_text(sys.stdin.read())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return received_settings


def test_process_receives_the_settings(settings: WorkerSettings, received_settings: Path) -> None:
    process = start(settings, ECHO)
    assert process is not None
    assert process.wait()
    assert WorkerSettings.model_validate_json(received_settings.read_text()) == settings


def test_a_worker_waits_for_the_one_that_was_begun(settings: WorkerSettings, received_settings: Path) -> None:
    KernelCompilation(settings, start(settings, ECHO)).wait()
    assert received_settings.exists()


def test_a_worker_begins_one_where_another_model_s_kernels_are(
    settings: WorkerSettings, received_settings: Path
) -> None:
    (cache_folder() / "quire-0.compiled").touch()
    assert start(settings, ECHO) is None
    KernelCompilation(settings, module=ECHO).wait()
    assert received_settings.exists()


def test_it_is_not_begun_where_kernels_are_on_disk(settings: WorkerSettings, received_settings: Path) -> None:
    lacking = missing(settings)
    assert lacking is not None
    lacking.leave_marker()
    assert start(settings, ECHO) is None
    KernelCompilation(settings, module=ECHO).wait()
    assert not received_settings.exists()


def test_one_that_dies_is_no_reason_to_fail(settings: WorkerSettings, caplog: pytest.LogCaptureFixture) -> None:
    KernelCompilation(settings, module="quire.services.worker.nothing_of_that_name").wait()
    assert "not all kernels are compiled" in caplog.text


def test_one_that_hangs_is_ended_with_its_children(settings: WorkerSettings, received_settings: Path) -> None:
    (received_settings.parent / "echo.py").write_text(
        "import os, pathlib, time\n"
        "if not os.fork():\n"
        f"    pathlib.Path({str(received_settings)!r}).write_text(str(os.getpid()))\n"
        "time.sleep(100)\n"
    )
    process = start(settings, ECHO)
    assert process is not None
    until(lambda: received_settings.exists() and received_settings.read_text())
    assert not process.wait(0.1)
    until(lambda: has_ended(int(received_settings.read_text())))


@pytest.mark.slow
def test_missing_model_is_not_reported_by_the_process() -> None:
    settings = WorkerSettings(model="/nowhere", device="cuda", threads=8)
    command = [sys.executable, "-m", compile_process.MODULE]
    words = settings.model_dump_json()
    done = subprocess.run(command, input=words, capture_output=True, text=True, check=False, timeout=250)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


@pytest.mark.parametrize("change", [{"device": "cpu"}, {"quantization": "fp8"}, {"threads": 2}])
def test_it_is_not_begun_where_nothing_is_compiled_beforehand(
    change: dict[str, object], settings: WorkerSettings
) -> None:
    changed = settings.model_copy(update=change)
    assert start(changed) is None
    assert missing(changed) is None


@pytest.mark.parametrize("variables", [{}, {"TRITON_HOME": "/somewhere"}, {"TRITON_CACHE_DIR": "/elsewhere"}])
def test_the_folder_is_triton_s(variables: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    code = "import triton; print(triton.knobs.cache.dir)"
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert cache_folder() == Path(said.strip())


@pytest.mark.slow
def test_early_init_has_finished_when_torch_is_imported() -> None:
    code = """
import sys
from quire.services.worker.warmup import early_init
early_init.start()
import threading, torch
from triton.runtime import cache
(thread,) = threading.enumerate()[1:] or [None]
if thread is not None:
    thread.join()
sys.exit(cache.triton_key.cache_info().misses != 1)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=250).returncode == 0


def test_the_first_half_of_a_start_imports_no_torch() -> None:
    code = "import sys, quire.services.worker.main; sys.exit('torch' in sys.modules or 'triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=250).returncode == 0
