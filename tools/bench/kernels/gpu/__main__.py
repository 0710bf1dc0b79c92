"""`python -m tools.bench.kernels.gpu [SECTION ...] [--json FILE]`

Sections are attention, latent, recurrent, rows, sampling, linear, experts, quantized, ... Prints median microseconds
of quire.kernels.triton on this GPU inside CUDA graphs, with cold memory where that is realistic, next to plain torch
or the hardware's limit (bytes and FLOP at the rates that an H200 reached).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from quire.kernels import triton
from tools.bench.kernels.gpu import attention, experts, latent, linear, quantized, recurrent, rows, sampling
from tools.bench.kernels.timing import BenchRow

SECTIONS: dict[str, Callable[[], Iterator[BenchRow]]] = {
    "attention": attention.bench,
    "latent": latent.bench,
    "rows": rows.bench,
    "sampling": sampling.bench,
    "linear": linear.bench,
    "experts": experts.bench,
    "quantized": quantized.bench,
    "recurrent": recurrent.bench,
}
ON_REQUEST = {
    "shapes": linear.shapes,
    "eight_bit_shapes": quantized.shapes,
    "packed_rows": quantized.packed_rows,
    "expert_tiles": experts.tiles,
    "latent_tiles": latent.tiles,
}


def main() -> None:
    """Runs the sections, prints a row per case, and writes them to a JSON file if requested. Exits with 1 if the
    Triton kernels cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.kernels.gpu", description=__doc__)
    names = ", ".join([*SECTIONS, *ON_REQUEST])
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), help=names)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    options = parser.parse_args()
    if triton.unavailable():
        parser.exit(1, f"quire.kernels.triton: {triton.unavailable()}\n")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, medians")
    measured = []
    for section in options.sections:
        for row in {**SECTIONS, **ON_REQUEST}[section]():
            measured.append(row)
            print(row, flush=True)
    if options.json:
        options.json.write_text(json.dumps([row.as_json() for row in measured], indent=1))


if __name__ == "__main__":
    main()
