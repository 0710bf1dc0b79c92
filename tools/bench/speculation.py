"""`python -m tools.bench speculation`: the same questions with every drafting method, and without."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from quire.bench import load, target
from quire.bench.load_client.timing import LoadResult
from quire.bench.measuring.ratio import ratio_of_rounds
from quire.bench.report import Row, progress
from quire.bench.target import Target
from quire.bench.workload import shapes, workloads
from quire.client import Client
from quire.flags import cluster_flags
from quire.flags.parser import CommandParser
from quire.flags.setting_flags import human_int
from quire.shared.errors import InvalidArgument
from quire.shared.pb.admin.v1 import admin_pb2
from tools.bench import tiny_work
from tools.bench.measuring import core_pinning

Runs = Sequence[Mapping[str, float]]

OFF = "off"
TREES = "_tree"  # suffix of a method's name
CONTROL = "control"  # a second equal cluster, to measure the noise
WITH_WEIGHTS = {"draft_model": "draft", "eagle": "eagle", "medusa": "medusa"}  # method -> folder of its weights
WITH_TREES = ("eagle", "medusa")
TREE = str([(0,) * depth + (rank,) for depth in range(4) for rank in range(2)])  # a chain, and the second choices
CONFIGS: dict[str, dict[str, object]] = {
    OFF: {},
    CONTROL: {},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2},
    "suffix": {"method": "suffix"},
    **{method: {"method": method} for method in WITH_WEIGHTS},
    **{f"{method}_tree": {"method": method} for method in WITH_TREES},
}


def configure(parser: CommandParser) -> None:
    """Adds the flags of target and load, the drafting methods and their options."""
    target.configure(parser)
    load.configure(parser, work=",".join(tiny_work.CLASSES), reset=True)
    parser.add_argument(
        "--load", default="1,burst", metavar="A,B,...", help="as for `quire bench serve` (default: 1,burst)"
    )
    names = [name for name in CONFIGS if name != CONTROL and not name.endswith(TREES)]
    trees = ", ".join(name for name in CONFIGS if name.endswith(TREES))
    what = f"{', '.join(names)} (default: all), {trees}, {CONTROL}: a second cluster that does not draft"
    parser.add_argument("--methods", default=",".join(names), metavar="A,B,...", help=what)
    parser.add_argument("--num-speculative-tokens", type=human_int, default=4, help="most drafts per sequence and step")
    what = "PATHS of the methods that end in _tree, of which --num-speculative-tokens are drafts (default: %(default)s)"
    parser.add_argument("--speculative-token-tree", default=TREE, metavar="PATHS", help=what)
    parser.add_argument(
        "--whole",
        action="store_true",
        help="request complete answers instead of streams, so that frontends are not the bottleneck",
    )
    parser.add_argument(
        "--same-cores",
        action="store_true",
        help="pin each role of every cluster to the same cores, for comparisons that are limited by the CPU",
    )
    parser.add_argument("--fixed", action="store_true", help="always draft that many tokens (adaptive_length off)")


def measure(arguments: argparse.Namespace) -> Iterator[Row]:
    """Runs all clusters at the same time, taking turns, so that other load affects all of them equally."""
    effort = load.load_options(arguments)
    cores = core_pinning.partition_cores(sorted(os.sched_getaffinity(0))) if arguments.same_cores else {}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        methods = _methods(arguments, Path(scratch))
        served = {}
        for method, config in methods.items():
            progress(f"starting a cluster: {method}")
            served[method] = stack.enter_context(_cluster(arguments, config, Path(scratch)))
            core_pinning.pin_services(served[method].pids, cores)
        if cores:
            core_pinning.pin(os.getpid(), cores[core_pinning.CLIENTS])
        for work in workloads.named(arguments.work):
            for arrival in arguments.load.split(","):
                trimmed = effort.trimmed(work, served[OFF].vocab_size)
                at_once = 0 if arguments.whole else _at_once(arguments, len(trimmed.items))
                yield from _rows(served, trimmed, arrival, effort, whole=arguments.whole, at_once=at_once)


def _at_once(arguments: argparse.Namespace, num_requests: int) -> int:
    """Returns the number of concurrent requests if known and exceeded by the workload; otherwise 0."""
    limit = int(vars(arguments).get("worker.max_num_seqs") or 0) * cluster_flags.num_workers(vars(arguments))
    return limit if limit < num_requests else 0


def _rows(
    served: Mapping[str, Target],
    work: workloads.Workload,
    arrival: str,
    effort: load.LoadOptions,
    *,
    whole: bool,
    at_once: int,
) -> Iterator[Row]:
    """Measures one workload on the clusters of all methods in turn and yields a row per method, with its speedup
    over `off` and its acceptance. `at_once` sequences count as a full batch."""
    before = {method: drafts(each) for method, each in served.items()}
    callers = [load.grpc_caller(each, work, final_only=whole) for each in served.values()]
    sides = [load.side_of_clients(each, caller) for each, caller in zip(served.values(), callers, strict=True)]
    read = functools.partial(_read, at_once=at_once)
    measured = load.measure_runs(sides, work, arrival=arrival, effort=effort, read=read)
    runs_of = dict(zip(served, measured, strict=True))
    for method, runs in runs_of.items():
        yield {
            "shape": served[method].name,
            "work": work.name,
            "load": arrival,
            "method": method,
            **_ratio(runs, runs_of[OFF], "out_tok_s", "speedup"),
            **(_ratio(runs, runs_of[OFF], "full_tok_s", "full_speedup") if at_once else {}),
            **load.medians(runs),
            **_came_of(before[method], drafts(served[method])),
        }


def _ratio(runs: Runs, off: Runs, rate: str, name: str) -> dict[str, float]:
    """Returns the ratio of a rate to that without drafts under `name`, with its error if it can be estimated."""
    ratio = ratio_of_rounds([run[rate] for run in runs], [run[rate] for run in off])
    return {name: ratio.value} | (
        {f"{name}_error": ratio.error} if ratio.error else {}
    )  # the ratio of `off` to itself has no error


def drafts(served: Target) -> admin_pb2.DraftCounts:
    """Returns the draft counters summed over all workers; all zero if the cluster does not draft."""
    total = admin_pb2.DraftCounts()
    with Client(served.grpc_address) as client:
        for service in client.status():
            total.num_drafts += service.drafts.num_drafts
            total.num_draft_tokens += service.drafts.num_draft_tokens
            total.num_accepted_tokens += service.drafts.num_accepted_tokens
            total.length = max(total.length, service.drafts.length)
    return total


def _came_of(before: admin_pb2.DraftCounts, after: admin_pb2.DraftCounts) -> dict[str, float]:
    """Returns `accepted`: share of accepted draft tokens; `tok_per_draft`: tokens per step, the regular one
    included; `drafts`: drafted sequences over all steps and runs; `length`: the final draft length."""
    tokens = after.num_draft_tokens - before.num_draft_tokens
    if not tokens:
        return {}
    right, count = after.num_accepted_tokens - before.num_accepted_tokens, after.num_drafts - before.num_drafts
    return {"accepted": right / tokens, "tok_per_draft": 1 + right / count, "drafts": count, "length": after.length}


def _read(outcome: LoadResult, at_once: int) -> dict[str, float]:
    """Returns the figures of a run; full_tok_s counts only until fewer than `at_once` streams are left (0: not
    measured)."""
    rates, latencies = outcome.rates(), outcome.latencies()
    full = {"full_tok_s": outcome.full_rate(at_once)} if at_once else {}
    return (
        full
        | {name: rates[name] for name in ("out_tok_s", "errors")}
        | {name: value for name, value in latencies.items() if name.startswith(("tpot_p50", "e2e_p50"))}
    )


def _methods(arguments: argparse.Namespace, scratch: Path) -> dict[str, dict[str, object]]:
    """Returns the speculative configuration by method, `off` first, with the folders of drafters that have weights.
    Raises InvalidArgument for unknown methods."""
    drafters = shapes.drafters(shapes.prepare(arguments.model, scratch), scratch)
    common = {"num_speculative_tokens": arguments.num_speculative_tokens, "adaptive_length": not arguments.fixed}
    names = [name for name in arguments.methods.split(",") if name != OFF]
    for name in names:
        if name not in CONFIGS:
            raise InvalidArgument(f"methods: {name!r} does not exist; available: {', '.join(CONFIGS)}", field="methods")
    configs = {name: dict(CONFIGS[name]) for name in names}
    for name, config in configs.items():
        method = str(config.get("method"))
        if method in WITH_WEIGHTS:
            config["model"] = str(drafters / WITH_WEIGHTS[method])
        if name.endswith(TREES):
            config["speculative_token_tree"] = arguments.speculative_token_tree
    return {OFF: {}} | {name: config | common if config else {} for name, config in configs.items()}


@contextlib.contextmanager
def _cluster(arguments: argparse.Namespace, config: Mapping[str, object], scratch: Path) -> Iterator[Target]:
    flags = vars(arguments) | ({"worker.speculative_config": json.dumps(config)} if config else {})
    with contextlib.closing(target.targets(argparse.Namespace(**flags), scratch)) as targets:
        yield next(targets)
