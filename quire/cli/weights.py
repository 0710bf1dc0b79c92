"""`quire weights`: replaces the weights of a cluster without a restart."""

from __future__ import annotations

import argparse

from quire.cli.connection import add_admin, client_of
from quire.clients.admin import PAUSE_MODES


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the admin address, the checkpoint's folder, the version's name and the mode."""
    add_admin(parser)
    parser.add_argument("folder", help="path of the checkpoint on the workers, in one of their --weights-folders")
    parser.add_argument(
        "--weight-version", default="", help="version that answers name these weights by; default: a number"
    )
    parser.add_argument(
        "--mode",
        choices=tuple(PAUSE_MODES),
        default="wait",
        help="running requests: wait until they end, keep them with the new weights, or abort them",
    )


def run(arguments: argparse.Namespace) -> int:
    """Replaces the weights on all workers and prints the new version; returns 0."""
    with client_of(arguments) as client:
        version = client.update_weights_from_disk(arguments.folder, arguments.weight_version, arguments.mode)
    print(f"weights: {version}")
    return 0
