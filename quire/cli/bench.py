"""`quire bench MODE`: measures, prints a table or JSON, and compares with what was measured before."""

from __future__ import annotations

import argparse
import importlib

from quire.bench import machine, report

# name -> (module, what it measures)
MODES = {
    "throughput": ("quire.bench.throughput", "all requests at once, answers whole: tokens per second"),
    "serve": ("quire.bench.serve", "streams over gRPC and the OpenAI API: latencies and tokens per second"),
    "latency": ("quire.bench.latency", "one stream: latency by token, and where the time of a step goes"),
    "embed": ("quire.bench.embed", "vectors of many inputs at once: inputs and tokens per second"),
    "startup": ("quire.bench.startup", "from the command to the ready line and to the first token"),
    "restart": ("quire.bench.restart", "prompts that come back to a worker that was killed and started again"),
    "scheduler": ("quire.bench.scheduler", "microseconds of planning a step, without workers"),
    "placement": (
        "quire.bench.placement",
        "where conversations go: hit rate and latency by placement, simulated workers",
    ),
    "roles": ("quire.bench.roles", "prompts computed apart from what decodes, against workers that do both"),
    "speculation": ("quire.bench.speculation", "the same questions with every way of drafting, and without"),
    "structured": ("quire.bench.structured", "answers under a schema each, and the same requests without"),
    "soak": ("quire.bench.soak", "a mixed load with cancels, broken connections and killed workers: what grows"),
    "kernels": ("quire.bench.kernels", "the benches beside the kernels"),
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
    return 1 if any(row.get("errors") for row in rows) else 0
