"""`quire bench MODE`: measures, prints a table or JSON, and compares with stored results."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence

from quire.bench import report
from quire.bench.measuring import machine

# name -> (module, what it measures)
MODES = {
    "throughput": ("quire.bench.modes.throughput", "throughput: all requests at once, without streaming"),
    "serve": ("quire.bench.modes.serve", "streams over gRPC and the OpenAI API: latencies, tokens per second"),
    "latency": ("quire.bench.modes.latency", "one stream: latency per token, and the parts of a step"),
    "embed": ("quire.bench.modes.embed", "embedding throughput: inputs and tokens per second"),
    "startup": ("quire.bench.modes.startup", "time from the command to the ready line, and to the first token"),
    "scheduler": ("quire.bench.modes.scheduler", "time to plan a step, without workers"),
}
Modes = Mapping[str, tuple[str, str]]


def configure(parser: argparse.ArgumentParser, modes: Modes = MODES) -> None:
    """Adds a subcommand per mode, which imports every mode's module, with its flags and those of the report."""
    chosen = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for name, (module, text) in modes.items():
        mode = chosen.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(module).configure(mode)
        report.configure(mode)


def run(arguments: argparse.Namespace) -> int:
    return measured(arguments, MODES, ["quire", *sys.argv[1:]])


def measured(arguments: argparse.Namespace, modes: Modes, command: Sequence[str]) -> int:
    """Runs the mode, publishes its rows with the `command` line, and returns 1 if a row has errors or shows growth."""
    module = importlib.import_module(modes[arguments.mode][0])
    machine.describe()  # before the measurement, to record the load of other processes
    rows = list(module.measure(arguments))
    report.publish(arguments, rows, command)
    return 1 if any(row.get("errors") or row.get("grows") for row in rows) else 0
