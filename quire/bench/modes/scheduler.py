"""`quire bench scheduler`: CPU time to plan a step and to apply its result, without a worker."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator

from quire.bench.report import Row, progress
from quire.flags.setting_flags import human_int

MODES = ("steady", "churn")


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags for the numbers of sequences, the modes and the repetitions."""
    parser.add_argument(
        "--running", type=_counts, default=(64, 256, 1024, 4096), metavar="N,N,...", help="running sequences"
    )
    parser.add_argument(
        "--modes",
        default=",".join(MODES),
        metavar="A,B",
        help="steady: every sequence decodes; churn: one in 64 ends with every step",
    )
    parser.add_argument("--steps", type=human_int, default=400, help="measured steps of a run")
    parser.add_argument(
        "--runs",
        type=human_int,
        default=3,
        help="repetitions of the same steps; p99_us is over each step's fastest repetition",
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per mode and number of sequences, measured in this process without a worker."""
    # The public API imports services only to run them.
    once = importlib.import_module("quire.services.scheduler.bench_scheduler").measure
    for mode in arguments.modes.split(","):
        for running in arguments.running:
            progress(f"{mode}, {running} running: {arguments.runs} runs of {arguments.steps} steps")
            yield once(running, mode, arguments.steps, arguments.runs)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(human_int(word) for word in text.split(","))
