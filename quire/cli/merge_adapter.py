"""`quire merge-adapter FOLDER ADAPTER OUT`: merges an adapter into a checkpoint."""

from __future__ import annotations

import argparse
from pathlib import Path


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, help="config.json and safetensors of 16 or 32 bits")
    parser.add_argument("adapter", type=Path, help="as PEFT saves it: adapter_config.json, adapter_model.safetensors")
    parser.add_argument("out", type=Path, help="folder to create")


def run(arguments: argparse.Namespace) -> int:
    """Writes the merged checkpoint to a new folder and prints what changed; returns 0."""
    from quire.checkpoints.merge_adapter import merge  # imports torch

    folder, adapter = arguments.folder.expanduser().resolve(), arguments.adapter.expanduser().resolve()
    report = merge(folder, adapter, arguments.out.expanduser())
    print(f"{report.out}: {report.num_changed} weights changed, {report.num_bytes / 1e6:.1f} MB")
    if report.unties:
        print("the output head is no longer tied to the embeddings: it is stored as a weight of its own")
    return 0
