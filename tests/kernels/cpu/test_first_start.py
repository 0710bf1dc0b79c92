"""The first start on a machine without a suitable build compiles one, once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from quire.kernels.cpu import build, built, first_start

needs_compiler = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")


@pytest.fixture
def nothing_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Provides one small source and an empty cache."""
    (tmp_path / "one.cpp").write_text("int one() { return 1; }\n")
    monkeypatch.setattr(built, "SOURCES", tmp_path)
    monkeypatch.setattr(built, "BUILD", tmp_path / "build")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@needs_compiler
def test_first_start_compiles_into_the_cache_and_logs_once(nothing_built: Path) -> None:
    messages: list[str] = []
    assert built.suitable() is None
    assert first_start.ensure(messages.append)
    assert first_start.ensure(messages.append)
    assert built.suitable() == built.cached()
    assert built.cached().is_relative_to(nothing_built / "cache")
    assert len(messages) == 1
    assert "once for this machine" in messages[0]
    assert not list(built.cached().glob("*.o"))


@needs_compiler
def test_processes_that_start_together_compile_once(nothing_built: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from quire.kernels.cpu import built, first_start;"
        "built.SOURCES = Path(sys.argv[1]); built.BUILD = built.SOURCES / 'build'; first_start.ensure(print);"
        "assert built.suitable()"
    )
    started = [
        subprocess.Popen([sys.executable, "-c", script, str(nothing_built)], stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    messages = "".join(process.communicate(timeout=60)[0] for process in started)
    assert [process.returncode for process in started] == [0, 0, 0]
    assert messages.count("\n") == 1, messages


@needs_compiler
def test_failed_builds_and_unwritable_caches_are_logged(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages: list[str] = []
    (nothing_built / "one.cpp").write_text("nonsense\n")
    first_start.ensure(messages.append)
    assert "nonsense" in messages[-1]
    (nothing_built / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(nothing_built / "file"))
    first_start.ensure(messages.append)
    assert "Not a directory" in messages[-1]
    assert built.suitable() is None


def test_missing_compiler_is_logged(nothing_built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(nothing_built))
    messages: list[str] = []
    assert not first_start.ensure(messages.append)
    assert "no C++ compiler" in messages[0]
