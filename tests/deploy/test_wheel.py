"""The wheel built from a fresh clone is complete, and as fast outside of the checkout as inside."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

import pytest

from quire.kernels.cpu import build, built

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".git", ".venv", ".hypothesis", "build", "dist", "tests", "*.egg-info", ".*_cache", "__pycache__")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a folder with the installed wheel. The clone has no generated protos; it shares the compiled kernels
    with the checkout, since compiling them takes half a minute (tests/kernels/cpu/test_build.py compiles)."""
    folder = tmp_path_factory.mktemp("package")
    clone, target = folder / "clone", folder / "installed"
    shutil.copytree(ROOT, clone, symlinks=True, ignore=shutil.ignore_patterns(*LEFT_OUT))
    if built.BUILD.is_dir():
        shutil.copytree(built.BUILD, clone / built.BUILD.relative_to(ROOT))
    for generated in (clone / "shared" / "pb").iterdir():
        if generated.is_dir():
            shutil.rmtree(generated)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    done = subprocess.run([*pip, "--target", str(target), str(clone)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def run(installed: Path, tmp_path: Path, *command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs a program far from the checkout, with an empty home folder."""
    env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(installed), **environment}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, check=False, env=env, cwd=tmp_path, timeout=100
    )


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler")
@pytest.mark.slow
def test_a_wheel_has_protocols_and_kernels_and_nothing_is_compiled_at_the_start(
    installed: Path, tmp_path: Path
) -> None:
    seen = run(installed, tmp_path, "-c", "from quire.kernels import cpu; print(cpu.__file__, cpu.unavailable())")
    assert seen.stdout.split() == [str(installed / "quire/kernels/cpu/__init__.py"), "None"], seen.stderr
    demo = run(installed, tmp_path, "-m", "quire", "demo")
    assert demo.returncode == 0, demo.stderr
    assert "\n68\n" in demo.stdout
    assert "yellow circle" in demo.stdout, "preprocessor_config.json is in the wheel"
    assert demo.stderr == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_questions_and_training_stay_in_the_checkout(installed: Path, tmp_path: Path) -> None:
    assert not {"evals", "training", "tests", "tools"} & {path.name for path in installed.iterdir()}
    assert not [*installed.rglob("h200-*.json")], "results of measurements"
    bench = ("-m", "quire", "bench", "throughput", "tiny", "--work")
    helped = run(installed, tmp_path, *bench, "single", "--help")
    assert helped.returncode == 0, helped.stderr
    refused = run(installed, tmp_path, *bench, "tiny_recall")
    assert refused.stderr.startswith("quire: work: 'tiny_recall' does not exist; available: mixed, single,")


PROGRAM = """
from quire import LLM, AsyncClient, Client, LLMEngine, SamplingParams
from quire.outputs import Delta

def text(llm: LLM) -> str:
    return llm.generate(["a"], SamplingParams(max_tokens=3))[0].outputs[0].text

def vectors(client: Client) -> list[list[float]]:
    return client.embed("a")

async def pieces(client: AsyncClient) -> list[Delta]:
    return [delta async for delta in client.stream("a")]

def names(client: Client) -> int:
    return client.models()[0].name  # line 15: a name is no number

def finished(engine: LLMEngine) -> list[bool]:
    return [output.finished for output in engine.step()]

SamplingParams(max_tokens="three")  # line 20
"""


@pytest.mark.slow
def test_a_users_program_is_checked_against_the_types_of_the_wheel(installed: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False, symlinks=True)
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "beside.pth").write_text("\n".join([str(installed), sysconfig.get_path("purelib")]))
    (tmp_path / "program.py").write_text(PROGRAM)
    words = ["--strict", "--python-executable", str(tmp_path / "venv/bin/python"), "--cache-dir", str(tmp_path / "c")]
    command = [sys.executable, "-m", "mypy", *words, "program.py"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = [line.partition(": error: ")[0] for line in done.stdout.splitlines() if ": error: " in line]
    assert found == ["program.py:15", "program.py:20"], done.stdout + done.stderr


@pytest.mark.slow
def test_without_kernels_and_compiler_the_demo_says_what_that_costs(installed: Path, tmp_path: Path) -> None:
    library = installed / "quire/kernels/cpu/build"
    hidden = library.rename(library.with_name("hidden")) if library.exists() else None
    try:
        demo = run(installed, tmp_path, "-m", "quire", "demo", PATH=str(tmp_path))
    finally:
        if hidden is not None:
            hidden.rename(library)
    assert "\n68\n" in demo.stdout, demo.stderr
    assert demo.stderr.count("\n") == 1
    assert "no C++ compiler: plain torch, several times slower, is used" in demo.stderr


def test_what_generates_the_protocols_is_pinned_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (pinned,) = [need for need in project["build-system"]["requires"] if need.startswith("grpcio-tools")]
    assert pinned in project["project"]["optional-dependencies"]["build"]
