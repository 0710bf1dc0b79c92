"""`quire bench latency`: a single stream, token by token, and the breakdown of its step time."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from quire.bench import load, target
from quire.bench.load_client.timing import LoadResult
from quire.bench.measuring.percentiles import spread_ms
from quire.bench.modes import serve
from quire.bench.report import Row
from quire.flags.parser import CommandParser

ONE_AT_A_TIME = "1"


def configure(parser: CommandParser) -> None:
    """Adds the flags of target, load and protocol; step times are always measured."""
    target.configure(parser)
    load.configure(parser, work="single", reset=True)
    serve.add_protocol(parser)
    parser.set_defaults(steps=True)


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Measures one request at a time on each target and protocol and yields a row for each."""
    effort = load.load_options(arguments)
    for served, work in load.served(arguments, effort):
        for protocol in serve.protocols(arguments.protocol, served):
            caller = serve.streaming(protocol, served, work)
            side = load.side_of_clients(served, caller)
            [measured] = load.measure([side], work, arrival=ONE_AT_A_TIME, effort=effort, read=_read)
            yield {"shape": served.name, "work": work.name, "protocol": protocol, **measured}


def _read(outcome: LoadResult) -> dict[str, float]:
    """Returns medians of TTFT and the distribution of token gaps over a run's streams."""
    gaps = [gap for timing in outcome.done for gap in timing.gaps]
    return {
        "out_tok_s": outcome.rates()["out_tok_s"],
        **spread_ms("ttft", [timing.ttft for timing in outcome.done if timing.arrivals], (0.5,)),
        **spread_ms("itl", gaps, (0.5, 0.9, 0.99, 0.999, 1.0)),
        **spread_ms("e2e", [timing.e2e for timing in outcome.done], (0.5,)),
        "errors": len(outcome.errors),
        "client_cpu": max(outcome.client_cpu_shares),
    }
