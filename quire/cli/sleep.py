"""`quire sleep` and `quire wake`: temporarily release the device memory of a cluster."""

from __future__ import annotations

import argparse

from quire.cli.connection import add_admin, client_of
from quire.clients.admin import PAUSE_MODES


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the admin address, and the tags for `quire wake` or level and mode for `quire sleep`."""
    add_admin(parser)
    if parser.prog.endswith(" wake"):
        parser.add_argument(
            "--tags", nargs="*", choices=("weights", "kv_cache"), default=[], help="what to wake; default: everything"
        )
        return
    parser.add_argument(
        "--level",
        type=int,
        choices=(1, 2),
        default=1,
        help="1: move the weights to host memory; 2: drop them and read them again on waking",
    )
    parser.add_argument(
        "--mode",
        choices=tuple(PAUSE_MODES),
        default="keep",
        help="running requests: keep them for `quire wake`, abort them, or wait until they end",
    )


def run(arguments: argparse.Namespace) -> int:
    """Puts all workers to sleep or wakes them, and prints how many sequences ended or wait; returns 0."""
    with client_of(arguments) as client:
        if arguments.command == "wake":
            asleep = client.wake_up(arguments.tags)
            print(f"still asleep: {', '.join(asleep)}" if asleep else "all workers are awake")
            return 0
        count = client.sleep(arguments.level, arguments.mode)
    print(f"all workers sleep; {'aborted' if arguments.mode == 'abort' else 'waiting'} sequences: {count}")
    return 0
