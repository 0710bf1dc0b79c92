"""`quire bench MODE`: measures, prints a table or JSON, and compares with what was measured before."""

from __future__ import annotations

import argparse
import importlib

from quire.bench import report
from quire.bench.measuring import machine

# name -> (module, what it measures)
MODES = {
    "throughput": ("quire.bench.modes.throughput", "all requests at once, answers whole: tokens per second"),
    "serve": ("quire.bench.modes.serve", "streams over gRPC and the OpenAI API: latencies and tokens per second"),
    "latency": ("quire.bench.modes.latency", "one stream: latency by token, and where the time of a step goes"),
    "embed": ("quire.bench.modes.embed", "vectors of many inputs at once: inputs and tokens per second"),
    "startup": ("quire.bench.modes.startup", "from the command to the ready line and to the first token"),
    "restart": ("quire.bench.modes.restart", "prompts that come back to a worker that was killed and started again"),
    "scheduler": ("quire.bench.modes.scheduler", "microseconds of planning a step, without workers"),
    "placement": (
        "quire.bench.modes.placement",
        "where conversations go: hit rate and latency by placement, simulated workers",
    ),
    "roles": ("quire.bench.modes.roles", "prompts computed apart from what decodes, against workers that do both"),
    "speculation": ("quire.bench.modes.speculation", "the same questions with every way of drafting, and without"),
    "structured": ("quire.bench.modes.structured", "answers under a schema each, and the same requests without"),
    "soak": ("quire.bench.modes.soak", "a mixed load with cancels, broken connections and killed workers: what grows"),
    "kernels": ("quire.bench.modes.kernels", "the benches beside the kernels"),
}


def configure(parser: argparse.ArgumentParser) -> None:
    modes = parser.add_subparsers(dest="mode", required=True, metavar="MODE")
    for name, (module, text) in MODES.items():
        mode = modes.add_parser(name, help=text, description=text, allow_abbrev=False)
        importlib.import_module(module).configure(mode)
        report.configure(mode)


def run(arguments: argparse.Namespace) -> int:
    module = importlib.import_module(MODES[arguments.mode][0])
    machine.describe()  # now, while the load is that of others
    rows = list(module.measure(arguments))
    report.deliver(arguments, rows)
    return 1 if any(row.get("errors") or row.get("grows") for row in rows) else 0
