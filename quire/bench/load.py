"""Measures a workload on targets: warm-up, runs, medians."""

from __future__ import annotations

import argparse
import contextlib
import functools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.bench.load_client import arrivals, clients
from quire.bench.load_client.arrivals import ArrivalPattern
from quire.bench.load_client.clients import ClientPool, Progress, RequestSender
from quire.bench.load_client.grpc_calls import GrpcCaller
from quire.bench.load_client.http_calls import HttpCaller, served_model
from quire.bench.load_client.timing import LoadResult
from quire.bench.measuring import service_cpu, step_times
from quire.bench.report import Row, progress
from quire.bench.target import Target, targets
from quire.bench.workload import adapters, media_workloads, workloads
from quire.bench.workload.images import NO_IMAGES, ImageOptions
from quire.bench.workload.workloads import Workload
from quire.flags.setting_flags import human_int
from quire.shared.errors import InvalidArgument, Unavailable

workloads.add(media_workloads.PICTURES, "vision")
workloads.add(media_workloads.CLIPS, "speech")

TURN_PAUSE_S = 2.0  # between sides: vLLM's worker busy-polls for a second after its last step


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """Number of runs and clients, and which part of the workload to send."""

    runs: int
    warmup: int
    clients: int
    requests: int  # 0: all
    reset: bool  # reset the prefix cache before each run
    temperature: float | None
    steps: bool  # read the services' histograms too

    def trimmed(self, work: Workload, vocab_size: int) -> Workload:
        work = work.within(vocab_size).first(self.requests)
        return work if self.temperature is None else work.sampled_at(self.temperature)


def configure(parser: argparse.ArgumentParser, work: str, *, reset: bool) -> None:
    """Adds the flags of every mode that sends requests: workloads (default `work`; "" adds no choice), runs,
    clients, temperature and cache resets (default `reset`)."""
    if work:
        names = f"{', '.join(workloads.WORKLOADS)}; gpu and cpu: sets of them"
        parser.add_argument("--work", default=work, metavar="A,B,...", help=f"{names} (default: {work})")
    parser.add_argument("--runs", type=human_int, default=3, help="measured runs; medians are shown")
    parser.add_argument("--warmup", type=human_int, default=1, help="unmeasured runs before them")
    parser.add_argument(
        "--requests",
        type=human_int,
        default=0,
        help="requests of a run, repeated from the first if the workload has fewer; 0: all",
    )
    parser.add_argument("--clients", type=human_int, default=clients.default_count(), help="client processes")
    parser.add_argument("--temperature", type=float, help="sampling temperature; default: the workload's own")
    parser.add_argument(
        "--reset-prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=reset,
        help=f"reset the prefix cache before each run (default: {'yes' if reset else 'no'})",
    )
    parser.add_argument("--steps", action="store_true", help="also report the time of each part of a step (us_...)")


def load_options(arguments: argparse.Namespace) -> LoadOptions:
    """Reads the load options from the command line; runs and clients are at least 1."""
    return LoadOptions(
        max(1, arguments.runs),
        arguments.warmup,
        max(1, arguments.clients),
        arguments.requests,
        arguments.reset_prefix_cache,
        arguments.temperature,
        arguments.steps,
    )


def served(arguments: argparse.Namespace, effort: LoadOptions) -> Iterator[tuple[Target, Workload]]:
    """Yields every requested workload on every requested target, trimmed to the requested size and spread over the
    adapters; a started cluster runs while its pairs are used."""
    with tempfile.TemporaryDirectory() as scratch:
        for target in targets(arguments, Path(scratch)):
            for work in workloads.named(arguments.work):
                yield target, adapters.in_turn(effort.trimmed(work, target.vocab_size), target.adapters)


def grpc_caller(target: Target, work: Workload, *, final_only: bool) -> Callable[[], RequestSender]:
    """Returns a factory of gRPC load clients, one per client process. Raises InvalidArgument for a target that is
    only known by its OpenAI API."""
    if not target.grpc_address:
        raise InvalidArgument(
            f"base_url: {target.name} is known by its OpenAI API only, and this mode sends requests over gRPC; use "
            "--address",
            field="base_url",
        )
    return functools.partial(
        GrpcCaller, target.grpc_address, work.temperature, final_only=final_only, frontends=target.frontends
    )


def http_caller(target: Target, work: Workload, images: ImageOptions = NO_IMAGES) -> Callable[[], RequestSender]:
    model = served_model(target.http_address)
    return functools.partial(HttpCaller, target.http_address, model, work.temperature, images)


class LoadClients(Protocol):
    """Sender of a load."""

    def run(self, work: Workload, arrivals: ArrivalPattern, progress: Progress | None = None) -> LoadResult: ...


@dataclass(frozen=True, slots=True)
class BenchSide:
    """A target and the way to send requests to it."""

    target: Target
    new_clients: Callable[[int], AbstractContextManager[LoadClients]]  # at most so many processes
    forget: Callable[[], None]  # resets the prefix cache
    asks: Callable[[Workload], Workload] = lambda work: work  # adapts the workload to this side


def side_of_clients(target: Target, new_caller: Callable[[], RequestSender]) -> BenchSide:
    return BenchSide(target, functools.partial(ClientPool, new_caller=new_caller), target.reset_prefix_cache)


def measure(
    sides: Sequence[BenchSide],
    work: Workload,
    *,
    arrival: str,
    effort: LoadOptions,
    read: Callable[[LoadResult], Mapping[str, float]],
) -> list[dict[str, float]]:
    """Returns the medians of each side over its runs."""
    return [medians(runs) for runs in measure_runs(sides, work, arrival=arrival, effort=effort, read=read)]


def measure_runs(
    sides: Sequence[BenchSide],
    work: Workload,
    *,
    arrival: str,
    effort: LoadOptions,
    read: Callable[[LoadResult], Mapping[str, float]],
) -> list[list[Mapping[str, float]]]:
    """Returns, for each side and run, what `read` computes and the services' CPU time.

    Sides alternate run by run, forwards and backwards, so that other load on the machine affects all of them
    equally.
    """
    comes = arrivals.parse(arrival)
    has_others = any(not side.target.grpc_address for side in sides[1:])
    count = comes.most_clients(min(effort.clients, len(work.items)))

    def run(side: BenchSide, players: LoadClients, title: str, number: int) -> Mapping[str, float]:
        """Performs one run of a side and returns its figures with the services' CPU and step times. Resets its
        prefix cache first if requested, and pauses if other servers are measured as well."""
        if effort.reset:
            side.forget()
        if has_others:
            time.sleep(TURN_PAUSE_S)
        watch = CostProbe(side.target, effort.steps)
        outcome = players.run(side.asks(work.in_run(number)), comes, _bar(title))
        _tell(title, outcome)
        return {**read(outcome), **watch.stop(outcome.num_tokens)}

    measured: list[list[Mapping[str, float]]] = [[] for _ in sides]
    with contextlib.ExitStack() as stack:
        players_of = [stack.enter_context(side.new_clients(count)) for side in sides]
        for number in range(-effort.warmup, effort.runs):
            name = f"run {number + 1}" if number >= 0 else "warm-up"
            turns = list(zip(sides, players_of, measured, strict=True))
            for side, players, runs in turns if number % 2 == 0 else reversed(turns):
                found = run(side, players, f"{side.target.name} {work.name} {arrival}, {name}", number + effort.warmup)
                if number >= 0:
                    runs.append(found)
    return measured


def comparison_rows(names: Sequence[str], about: Row, measured: Sequence[Row]) -> Iterator[Row]:
    """Yields one row per server and, for several servers, the ratios of the first to each other one."""
    if len(names) == 1:
        yield {**about, **measured[0]}
        return
    names = ["quire", *names[1:]]
    for name, row in zip(names, measured, strict=True):
        yield {**about, "server": name, **row}
    for name, row in zip(names[1:], measured[1:], strict=True):
        shared = [key for key, value in row.items() if value and key in measured[0] and key != "runs"]
        ratios = {key: float(measured[0][key]) / float(row[key]) for key in shared}
        yield {**about, "server": f"quire / {name}", **ratios}


class CostProbe:
    """Measures what the services do between its creation and stop()."""

    def __init__(self, target: Target, steps: bool) -> None:
        self._pids = target.pids
        self._pages = target.metrics if steps else {}
        self._sums = step_times.read(self._pages)
        self._cpu_s = service_cpu.seconds(self._pids)

    def stop(self, num_tokens: int) -> dict[str, float]:
        """Returns the services' CPU time per token and their mean step times in microseconds since the start."""
        cpu_s = service_cpu.seconds(self._pids)
        return {
            **service_cpu.per_token(self._cpu_s, cpu_s, num_tokens),
            **step_times.means_us(self._sums, step_times.read(self._pages)),
        }


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Returns the median of each measure over the runs that have it, and the number of runs."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {
        **{name: statistics.median(run[name] for run in runs if name in run) for name in names},
        "runs": len(runs),
    }


def _bar(title: str) -> Callable[[int, int], None] | None:
    """Returns a callback that overwrites a progress line on stderr; None if that is no terminal."""
    if not sys.stderr.isatty():
        return None
    begin = time.monotonic()
    return lambda ended, total: print(
        f"\r{title}: {ended}/{total} requests, {time.monotonic() - begin:.0f} s ", end="", file=sys.stderr, flush=True
    )


def _tell(title: str, outcome: LoadResult) -> None:
    """Prints a run's rates and its first error on stderr, and a hint if a client process was busy. Raises
    Unavailable if every request failed."""
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
