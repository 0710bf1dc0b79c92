"""One workload on one target: warm-up, runs, medians."""

from __future__ import annotations

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from quire.bench import arrivals, clients, service_cpu, workloads
from quire.bench.clients import Caller, Clients
from quire.bench.grpc_calls import GrpcCaller
from quire.bench.http_calls import HttpCaller, served_model
from quire.bench.report import Row, progress
from quire.bench.target import Target
from quire.bench.timing import Outcome
from quire.bench.workloads import Workload
from quire.cli.flags import human_int
from shared.errors import Unavailable

CONNECTIONS_PER_FRONTEND = 4  # of all clients together; the kernel spreads connections by chance


@dataclass(frozen=True, slots=True)
class Effort:
    """How often, with how many clients, and what of the workload."""

    runs: int
    warmup: int
    clients: int
    requests: int  # 0: all
    reset: bool  # forget cached prefixes before each run
    temperature: float | None

    def trimmed(self, work: Workload, vocab_size: int) -> Workload:
        work = work.within(vocab_size).first(self.requests)
        return work if self.temperature is None else work.sampled_at(self.temperature)


def configure(parser: argparse.ArgumentParser, work: str, *, reset: bool) -> None:
    """Flags of every mode that sends requests."""
    names = ", ".join(workloads.WORKLOADS)
    parser.add_argument("--work", default=work, metavar="A,B,...", help=f"{names}; gpu and cpu: sets (default: {work})")
    parser.add_argument("--runs", type=human_int, default=3, help="measured runs; medians are shown")
    parser.add_argument("--warmup", type=human_int, default=1, help="runs before those")
    parser.add_argument("--requests", type=human_int, default=0, help="only the first so many of a workload; 0: all")
    parser.add_argument("--clients", type=human_int, default=clients.default_count(), help="client processes")
    parser.add_argument("--temperature", type=float, help="instead of the workload's own")
    parser.add_argument(
        "--reset-prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=reset,
        help=f"forget cached prefixes before each run (default: {'yes' if reset else 'no'})",
    )


def effort_of(arguments: argparse.Namespace) -> Effort:
    return Effort(
        max(1, arguments.runs),
        arguments.warmup,
        max(1, arguments.clients),
        arguments.requests,
        arguments.reset_prefix_cache,
        arguments.temperature,
    )


def grpc_caller(target: Target, work: Workload, count: int, *, final_only: bool) -> Callable[[], Caller]:
    connections = 1 if target.frontends == 1 else math.ceil(CONNECTIONS_PER_FRONTEND * target.frontends / count)
    return functools.partial(
        GrpcCaller, target.grpc_address, work.temperature, final_only=final_only, connections=connections
    )


def http_caller(target: Target, work: Workload) -> Callable[[], Caller]:
    return functools.partial(HttpCaller, target.http_address, served_model(target.http_address), work.temperature)


def measure(
    target: Target,
    work: Workload,
    *,
    arrival: str,
    effort: Effort,
    new_caller: Callable[[], Caller],
    read: Callable[[Outcome], Mapping[str, float]],
) -> dict[str, float]:
    """Medians over the runs of what `read` says, and the services' CPU time."""
    comes = arrivals.parse(arrival)
    count = comes.most_clients(min(effort.clients, len(work.items)))
    measured: list[Mapping[str, float]] = []
    with Clients(count, new_caller) as processes:
        for number in range(-effort.warmup, effort.runs):
            if effort.reset:
                target.reset_prefix_cache()
            title = f"{target.name} {work.name} {arrival}, " + (f"run {number + 1}" if number >= 0 else "warm-up")
            before = service_cpu.seconds(target.pids)
            outcome = processes.run(work, comes, _bar(title))
            cpu = service_cpu.per_token(before, service_cpu.seconds(target.pids), outcome.num_tokens)
            _tell(title, outcome)
            if number >= 0:
                measured.append({**read(outcome), **cpu})
    return medians(measured)


def medians(runs: list[Mapping[str, float]]) -> dict[str, float]:
    """The median of each measure over the runs that have it, and how many runs there were."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {
        **{name: statistics.median(run[name] for run in runs if name in run) for name in names},
        "runs": len(runs),
    }


def about(target: Target, work: Workload) -> Row:
    return {"shape": target.name, "work": work.name}


def _bar(title: str) -> Callable[[int, int], None] | None:
    """A line that is written over, for people who wait."""
    if not sys.stderr.isatty():
        return None
    begin = time.monotonic()
    return lambda ended, total: print(
        f"\r{title}: {ended}/{total} requests, {time.monotonic() - begin:.0f} s ", end="", file=sys.stderr, flush=True
    )


def _tell(title: str, outcome: Outcome) -> None:
    failed = outcome.errors
    if len(failed) == len(outcome.timings):
        raise Unavailable(f"every request of {title} failed: {failed[0]}")
    rates = outcome.rates()
    line = f"{title}: {rates['out_tok_s']:,.0f} output tokens/s, {rates['wall_s']:.2f} s"
    progress(("\r" if sys.stderr.isatty() else "") + line)
    if failed:
        progress(f"  {len(failed)} requests failed: {failed[0]}")
    if rates["client_cpu"] > clients.BUSY:
        progress(f"  a client process was busy {rates['client_cpu']:.0%} of the time: more --clients may measure more")
