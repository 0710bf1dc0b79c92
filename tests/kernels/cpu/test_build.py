from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path

import pytest

from quire.kernels import cpu
from quire.kernels.cpu import build, built, processor

compiler = build.find_compiler()
needs_compiler = pytest.mark.skipif(compiler is None, reason="no C++ compiler")


@pytest.fixture
def small_sources(tmp_path: Path, monkeypatch) -> Path:
    """Provides two sources and a header instead of the real ones."""
    (tmp_path / "runtime").mkdir()
    (tmp_path / "runtime" / "shared.h").write_text("#define VALUE 1\n")
    (tmp_path / "one.cpp").write_text('#include "shared.h"\nint one() { return VALUE; }\n')
    (tmp_path / "two.cpp").write_text("int two() { return 2; }\n")
    monkeypatch.setattr(built, "SOURCES", tmp_path)
    return tmp_path


@pytest.mark.skipif(compiler is None, reason="no C++ compiler")
def test_library_is_built_if_there_is_a_compiler():
    assert cpu.unavailable() is None


@needs_compiler
def test_only_what_changed_is_compiled(small_sources: Path):
    directory = small_sources / "build"
    assert build.build(compiler, "native", directory) == 2
    assert built.unsuitable(directory) is None
    assert build.build(compiler, "native", directory) == 0
    (small_sources / "two.cpp").write_text("int two() { return 22; }\n")
    assert "other sources" in built.unsuitable(directory)
    assert build.build(compiler, "native", directory) == 1
    (small_sources / "runtime" / "shared.h").write_text("#define VALUE 11\n")
    assert build.build(compiler, "native", directory) == 2
    assert built.unsuitable(directory) is None


@needs_compiler
def test_other_flags_or_another_cpu_mean_another_build(small_sources: Path, monkeypatch):
    directory = small_sources / "build"
    build.build(compiler, "native", directory)
    monkeypatch.setattr(processor, "features", lambda: ("fpu", "sse"))
    assert build.build(compiler, "native", directory) == 2
    assert build.build(compiler, "native", directory, (*build.FLAGS, "-DOTHER")) == 2
    assert len(list(directory.glob("*.o"))) == 2


@needs_compiler
def test_compiler_output_is_in_the_error(small_sources: Path, capsys):
    (small_sources / "two.cpp").write_text("int two() { return absent; }\n")
    assert build.main([], small_sources / "build") == 1
    assert "absent" in capsys.readouterr().err


def test_without_a_compiler_there_is_one_line_and_no_error(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main([]) == 0
    assert (
        capsys.readouterr().out
        == "quire.kernels.cpu: no C++ compiler (g++, clang++, c++); the reference will be used\n"
    )
    assert "not built" in built.unsuitable(tmp_path)


def write_stamp(directory: Path, **changes) -> None:
    (directory / built.LIBRARY).touch()
    stamp = {"linked": "", "sources": built.source_digest(), "machine": platform.machine(), "needs": [], **changes}
    (directory / built.STAMP).write_text(json.dumps(stamp))


def test_a_library_for_another_cpu_is_refused(tmp_path: Path):
    write_stamp(tmp_path)
    assert built.unsuitable(tmp_path) is None
    write_stamp(tmp_path, needs=["avx1024_magic"])
    assert "avx1024_magic" in built.unsuitable(tmp_path)
    write_stamp(tmp_path, machine="pdp11")
    assert "pdp11" in built.unsuitable(tmp_path)


@pytest.mark.slow
@pytest.mark.skipif(compiler is None or platform.machine() != "x86_64", reason="needs a compiler for x86-64")
@pytest.mark.parametrize("arch", ["x86-64", "sapphirerapids", "x86-64-v3"])
def test_every_width_compiles(arch: str):
    """Each of 4, 8 and 16 lanes compiles without a warning, with and without bfloat16 instructions."""
    flags = (*build.FLAGS, *build.WARNINGS, "-Werror", build.target(arch), *build.header_folders(), "-fsyntax-only")
    running = [subprocess.Popen((compiler, *flags, str(source))) for source in built.sources()]
    assert [process.wait() for process in running] == [0] * len(running)


def test_cores_are_counted_within_the_affinity():
    assert 1 <= processor.usable_cores() <= len(os.sched_getaffinity(0))


def test_cpu_features_of_an_unknown_system(tmp_path: Path):
    assert processor.features(tmp_path / "absent") == ()
