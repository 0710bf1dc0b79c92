"""`python -m tools.bench kernels`: runs the kernel benchmarks, each in a process of its own."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from quire.bench.report import Row, progress
from quire.shared.errors import Unavailable

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "kernels"
STDERR = 2  # the programs' tables are shown as progress


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the programs and sections to run."""
    names = ", ".join(programs())
    parser.add_argument(
        "--programs", default="", metavar="A,B,...", help=f"programs of tools.bench.kernels: {names} (default: all)"
    )
    parser.add_argument("sections", nargs="*", help="sections of them to run (default: all)")


def measure(arguments: argparse.Namespace, folder: Path = FOLDER) -> Iterator[Row]:
    """Runs each program in a process of its own and yields its rows; raises Unavailable if none has any. `folder`: that
    of the programs."""
    rows = []
    for program in arguments.programs.split(",") if arguments.programs else programs(folder):
        rows += [flat(program, row) for row in run(program, arguments.sections, folder)]
    if not rows:
        asked = arguments.programs or ", ".join(programs(folder))
        raise Unavailable(
            f"no kernel benchmark finished: of {asked} none can run on this machine, or none has the sections"
            f" {' '.join(arguments.sections) or '(all)'}; what each said stands above. Choose others with --programs"
        )
    yield from rows


def programs(folder: Path = FOLDER) -> list[str]:
    """Returns the packages in a folder, each of which is a program."""
    return sorted(path.parent.name for path in folder.glob("*/__main__.py"))


def run(program: str, sections: list[str], folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Runs a program and returns its rows; none if it cannot run on this machine."""
    progress(f"tools.bench.kernels.{program}")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "rows.json"
        command = [sys.executable, "-P", str(folder / program / "__main__.py"), *sections, "--json", str(target)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, stdout=STDERR, env=environment, check=False)
        if done.returncode or not target.is_file():
            progress(f"tools.bench.kernels.{program} ended with status {done.returncode}")
            return []
        rows: list[dict[str, Any]] = json.loads(target.read_text())
        return rows


def flat(program: str, row: Mapping[str, Any]) -> Row:
    """Returns a row with Quire's time first, then its rivals', in microseconds."""
    times = {f"us_{name}": value for name, value in row["microseconds"].items()}
    rate = {f"rate_{row['unit']}": row["rate"]} if row.get("unit") else {}
    ratio = {"ratio": row["ratio"]} if len(times) > 1 else {}
    return {"program": program, "section": row["section"], "case": row["case"], **times, **rate, **ratio}
