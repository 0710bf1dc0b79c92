"""`quire pause` and `quire resume`: pause and resume generation of a cluster."""

from __future__ import annotations

import argparse

from quire.cli.connection import add_admin, client_of
from quire.clients.admin import PAUSE_MODES


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the admin address, and the mode for `quire pause`."""
    add_admin(parser)
    if parser.prog.endswith(" pause"):
        parser.add_argument(
            "--mode",
            choices=tuple(PAUSE_MODES),
            default="keep",
            help="running requests: keep them for `quire resume`, abort them, or wait until they end",
        )


def run(arguments: argparse.Namespace) -> int:
    """Pauses or resumes generation on the whole cluster and prints the number of affected sequences; returns 0."""
    with client_of(arguments) as client:
        if arguments.command == "resume":
            client.resume_generation()
            print("generation has resumed")
            return 0
        count = client.pause_generation(arguments.mode)
    print(f"generation is paused; {'aborted' if arguments.mode == 'abort' else 'waiting'} sequences: {count}")
    return 0
