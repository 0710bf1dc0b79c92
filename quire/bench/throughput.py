"""`quire bench throughput`: all requests at once, answers whole, as `LLM.generate` does it; over real processes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from quire.bench import load, target
from quire.bench.report import Row
from quire.bench.timing import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    target.configure(parser)
    load.configure(parser, work="mixed", reset=True)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    effort = load.effort_of(arguments)
    for served, work in load.served(arguments, effort):
        caller = load.grpc_caller(served, work, effort.clients, final_only=True)
        side = load.Side(served, caller)
        [measured] = load.measure([side], work, arrival="burst", effort=effort, read=Outcome.rates)
        yield {"shape": served.name, "work": work.name, **measured}
