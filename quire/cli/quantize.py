"""`quire quantize FOLDER --to fp8|int8|w4a16 [--lm-head] [--out FOLDER]`: quantizes a checkpoint to 8 or 4 bits."""

from __future__ import annotations

import argparse
from pathlib import Path

TO = ("fp8", "int8", "w4a16")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the folder, the target format and the output folder."""
    parser.add_argument("folder", type=Path, help="config.json and safetensors of 16 or 32 bits")
    parser.add_argument("--to", choices=TO, required=True, help="8-bit floats, 8-bit integers, or 4 bits by groups")
    parser.add_argument("--lm-head", action="store_true", help="also quantize the output head, to 8 bits")
    parser.add_argument("--out", type=Path, help="folder to create (default: FOLDER-TO, for example model-fp8)")


def run(arguments: argparse.Namespace) -> int:
    """Writes the quantized checkpoint to a new folder and prints sizes and relative errors; returns 0."""
    from quire.checkpoints.quantize import quantize  # imports torch

    folder: Path = arguments.folder.expanduser().resolve()
    out = arguments.out.expanduser() if arguments.out else folder.with_name(f"{folder.name}-{arguments.to}")
    report = quantize(folder, arguments.to, out, head=arguments.lm_head)
    worst, name = report.worst
    print(f"{out}: {report.num_projections} projections quantized to {arguments.to}")
    print(f"size: {report.bytes_before / 1e6:.1f} MB before, {report.bytes_after / 1e6:.1f} MB after")
    print(f"relative error of the weights: {report.error:.2%}, at most {worst:.2%} ({name})")
    return 0
