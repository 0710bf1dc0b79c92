"""The report of processor time counts what tests and their processes compute, and nothing of their waits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.processor_time import Phase, of_this_process, table

ROOT = Path(__file__).parents[1]
COMPUTES = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
FILE = f"""
import subprocess, sys
def test_computes():
    assert not subprocess.run([sys.executable, "-c", {COMPUTES!r}], input=b"\\n").returncode
def test_waits():
    pass
"""


def test_a_child_counts_while_it_runs_and_after_its_end() -> None:
    before = of_this_process()
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert of_this_process() - before >= 0.28
        child.communicate(b"\n")
    assert of_this_process() - before >= 0.28


def test_cases_are_added_up_by_function_and_folder() -> None:
    worker, scheduler = (
        "tests/services/worker/lora/test_a.py::test_x",
        "tests/services/scheduler/core/test_b.py::test_y",
    )
    phases = [Phase(f"{worker}[1]", 1.0), Phase(f"{worker}[1]", 0.5), Phase(f"{worker}[2]", 2.0), Phase(scheduler, 3.0)]
    assert table([*phases, Phase("tests/test_c.py::test_z", 0.25)], 10.0) == [
        "10 s, of which 7 s in tests and 3 s in imports and collection",
        "     3.5  tests/services/worker/lora",
        "     3.0  tests/services/scheduler/core",
        "     0.2  tests",
        "the 20 most expensive tests (seconds, cases, seconds of a case):",
        f"     3.5      2    1.750  {worker}",
        f"     3.0      1    3.000  {scheduler}",
        "     0.2      1    0.250  tests/test_c.py::test_z",
    ]


def test_processes_of_xdist_report_to_one(tmp_path: Path) -> None:
    (tmp_path / "test_file.py").write_text(FILE)
    command = [sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.processor_time", "--numprocesses", "1"]
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)}
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
        environment.pop(name, None)
    ran = subprocess.run(
        [*command, "--rootdir", str(tmp_path), "."],
        check=False,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    report = ran.stdout.partition("processor time")[2]
    first = report.partition("of a case):")[2].splitlines()[1]
    assert first.endswith("test_file.py::test_computes"), ran.stdout + ran.stderr
    assert float(first.split()[0]) >= 0.3
