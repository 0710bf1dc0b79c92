"""`quire bench throughput`: all requests at once with complete answers, as with `LLM.generate`, over real processes."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

from quire.bench import load, target
from quire.bench.load_client.programs import Program
from quire.bench.load_client.timing import LoadResult
from quire.bench.report import Row
from quire.bench.target import Target
from quire.bench.workload import adapters
from quire.flags.parser import CommandParser

BASE = "without adapters"  # the same cluster, alternating


def configure(parser: CommandParser) -> None:
    """Adds the flags of target, adapters and load, and of another engine's program to compare with."""
    target.configure(parser)
    adapters.configure(parser)
    load.configure(parser, work="mixed", reset=True)
    parser.add_argument(
        "--beside",
        default="",
        metavar="NAME=COMMAND",
        help="another engine's program with the same model (tools/bench/peers): runs take turns",
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures each target with all requests at once, alternating with the base model if adapters are used and with
    the other engine."""
    effort = load.load_options(arguments)
    with rival(arguments.beside) as others:
        for served, work in load.served(arguments, effort):
            caller = load.grpc_caller(served, work, final_only=True)
            own = load.side_of_clients(served, caller)
            base = replace(own, target=replace(served, name=BASE), asks=adapters.without)
            sides = [own, *([base] if served.adapters else []), *others]
            measured = load.measure(sides, work, arrival="burst", effort=effort, read=LoadResult.rates)
            names = [side.target.name for side in sides]
            yield from load.comparison_rows(names, {"shape": served.name, "work": work.name}, measured)


@contextmanager
def rival(text: str) -> Iterator[list[load.BenchSide]]:
    """Starts the other engine's program from NAME=COMMAND and yields it as a side; an empty text yields no side."""
    if not text:
        yield []
        return
    name, command = target.named(text, "COMMAND")
    with Program(command) as program:
        yield [load.BenchSide(Target(name, 0), lambda _: nullcontext(program), program.forget)]
