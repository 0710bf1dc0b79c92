"""`quire bench scheduler`: microseconds to plan a step and to take in its result, without any worker."""

from __future__ import annotations

import argparse
import importlib
import statistics
from collections.abc import Iterator, Mapping, Sequence

from quire.bench.report import Row, Value, progress
from quire.cli.flags import human_int

MODES = ("steady", "churn")
ORDER = ("running", "mode", "schedule_us", "apply_us", "total_us", "encode_us", "decode_us", "plan_bytes")


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--running", type=_counts, default=(64, 256, 1024, 4096), metavar="N,N,...", help="sequences")
    parser.add_argument(
        "--modes", default=",".join(MODES), metavar="A,B", help="steady: all decode; churn: a 64th ends with every step"
    )
    parser.add_argument("--steps", type=human_int, default=400, help="measured steps of a run")
    parser.add_argument("--runs", type=human_int, default=3, help="runs; the medians of their medians are shown")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    # The public face imports services only when it runs one.
    once = importlib.import_module("services.scheduler.bench_scheduler").measure
    for mode in arguments.modes.split(","):
        for running in arguments.running:
            progress(f"{mode}, {running} running: {arguments.runs} runs of {arguments.steps} steps")
            yield median_row([once(running, mode, arguments.steps) for _ in range(arguments.runs)])


def median_row(runs: Sequence[Mapping[str, Value]]) -> Row:
    return {name: _median([run[name] for run in runs]) for name in ORDER}


def _median(values: Sequence[Value]) -> Value:
    numbers = [value for value in values if not isinstance(value, str)]
    return statistics.median_low(numbers) if numbers else values[0]


def _counts(text: str) -> tuple[int, ...]:
    return tuple(human_int(word) for word in text.split(","))
