"""`python -m tools.bench roles`: separate prefill and decode workers against mixed workers, at equal load.

One cluster after the other, each using all GPUs; the last row of a load is the ratio of the first to the second.
"""

from __future__ import annotations

import argparse
import dataclasses
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from quire.bench import load, target
from quire.bench.load_client.http_calls import root_of
from quire.bench.load_client.timing import LoadResult
from quire.bench.modes import serve
from quire.bench.report import Row
from quire.bench.target import Target
from quire.bench.workload import shapes, workloads
from quire.flags.parser import CommandParser
from quire.metrics import Counter, parse
from quire.shared.errors import InvalidArgument

APART, MIXED = "apart", "mixed"
COUNTED = {
    "handovers": "quire_scheduler_handovers_total",
    "fetched_tokens": "quire_scheduler_fetched_tokens_total",
    "failed": "quire_worker_kv_fetches_failed_total",
}


def configure(parser: CommandParser) -> None:
    """Adds the flags of target and load, with one prefill and one decode worker by default."""
    target.configure(parser)
    load.configure(parser, work="cpu_long_prompts", reset=True)
    parser.set_defaults(prefill_workers=1, decode_workers=1)
    parser.add_argument(
        "--load", default="", metavar="A,B,...", help="as for `quire bench serve`; default: the workload's own"
    )


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Yields, per load, rows of mixed workers, of separate ones, and of their ratios; raises InvalidArgument for a
    given cluster."""
    effort = load.load_options(arguments)
    if arguments.address or arguments.base_url or arguments.workers is not None:
        text = "this benchmark starts its own clusters; set --prefill-workers and --decode-workers instead"
        raise InvalidArgument(f"workers: {text}", field="workers")
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.model.split(","):
            shape = shapes.prepare(name, Path(scratch))
            measured = {MIXED: _rows(arguments, shape, effort, MIXED), APART: _rows(arguments, shape, effort, APART)}
            for apart, mixed in zip(measured[APART], measured[MIXED], strict=True):
                yield from (mixed, apart, _shares(apart, mixed))


def _rows(arguments: argparse.Namespace, shape: shapes.BenchShape, effort: load.LoadOptions, layout: str) -> list[Row]:
    """Starts a cluster of the layout, mixed or separate workers in equal number, and returns a row for every
    workload and load."""
    number = arguments.prefill_workers + arguments.decode_workers
    own = argparse.Namespace(**vars(arguments))
    if layout == MIXED:
        own.workers, own.prefill_workers, own.decode_workers = number, 0, 0
    rows: list[Row] = []
    with target.started_cluster(own, shape) as served:
        for made in workloads.named(arguments.work):
            work = effort.trimmed(made, served.vocab_size)
            for arrival in (arguments.load or work.load).split(","):
                named = dataclasses.replace(served, name=f"{served.name} {layout}")
                side = load.side_of_clients(named, serve.streaming("grpc", served, work))
                before = _counts(served)
                [found] = load.measure([side], work, arrival=arrival, effort=effort, read=_read)
                counted = {name: value - before[name] for name, value in _counts(served).items()}
                about = {"shape": served.name, "work": work.name, "load": arrival, "layout": layout}
                rows.append({**about, **found, **(counted if layout == APART else {})})
    return rows


def _read(outcome: LoadResult) -> dict[str, float]:
    return outcome.rates() | outcome.latencies()


def _counts(served: Target) -> dict[str, float]:
    """Returns the number of handovers over all services."""
    found = [metric for address in served.metrics.values() for metric in parse(_page(address))]
    counters = [metric for metric in found if isinstance(metric, Counter)]
    return {short: sum(c.value for c in counters if c.name == name) for short, name in COUNTED.items()}


def _page(address: str) -> str:
    with urllib.request.urlopen(f"{root_of(address)}/metrics", timeout=10) as response:
        return str(response.read().decode())


def _shares(apart: Row, mixed: Row) -> Row:
    """Returns a row of the ratios of separate to mixed workers, for the numbers that both have."""
    texts = ("shape", "work", "load")
    shared = [name for name, value in mixed.items() if isinstance(value, int | float) and value and name in apart]
    ratios = {name: float(apart[name]) / float(mixed[name]) for name in shared if name != "runs"}
    return {**{name: apart[name] for name in texts}, "layout": f"{APART} / {MIXED}", **ratios}
