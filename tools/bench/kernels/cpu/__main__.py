"""`python -m tools.bench.kernels.cpu [SECTION ...] [--threads N] [--json FILE]`

Sections are linear, experts, attention, ... Prints medians of quire.kernels.cpu, torch (oneDNN) and the reference.
Compare ratios: absolute times drift with the machine.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from quire.kernels import cpu
from tools.bench.kernels.cpu import (
    adapters,
    attention,
    experts,
    latent,
    linear,
    quantized,
    recurrent,
    rows,
    sampling,
    step,
)
from tools.bench.kernels.timing import BenchRow

SECTIONS: dict[str, Callable[[], Iterator[BenchRow]]] = {
    "linear": linear.bench,
    "experts": experts.bench,
    "attention": attention.bench,
    "latent": latent.bench,
    "recurrent": recurrent.bench,
    "sampling": sampling.bench,
    "quantized": quantized.bench,
    "rows": rows.bench,
    "step": step.bench,
    "adapters": adapters.bench,
}


def main() -> None:
    """Runs the sections, prints a row per case, and writes them to a JSON file if requested. Exits with 1 if the CPU
    kernels cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.kernels.cpu", description=__doc__)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=", ".join(SECTIONS))
    parser.add_argument("--threads", type=int, default=cpu.num_threads())
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if cpu.unavailable():
        parser.exit(1, f"quire.kernels.cpu: {cpu.unavailable()}\n")
    cpu.set_num_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads, torch {torch.__version__}, load {os.getloadavg()[0]:.1f}, medians")
    measured = []
    for section in options.sections:
        for row in SECTIONS[section]():
            measured.append(row)
            print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in measured], indent=1))


if __name__ == "__main__":
    main()
