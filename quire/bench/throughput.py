"""`quire bench throughput`: all requests at once, answers whole, as `LLM.generate` does it; over real processes."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path

from quire.bench import load, target, workloads
from quire.bench.report import Row
from quire.bench.timing import Outcome


def configure(parser: argparse.ArgumentParser) -> None:
    target.configure(parser)
    load.configure(parser, work="mixed", reset=True)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    effort = load.effort_of(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        for served in target.targets(arguments, Path(scratch)):
            for listed in workloads.named(arguments.work):
                work = effort.trimmed(listed, served.vocab_size)
                caller = load.grpc_caller(served, work, effort.clients, final_only=True)
                yield {
                    **load.about(served, work),
                    **load.measure(served, work, arrival="burst", effort=effort, new_caller=caller, read=Outcome.rates),
                }
