"""Compares draft trees with chains of equal size: CPU time per token, tokens per second and tokens per step, on
questions that quire-tiny can answer.

    python -m tests.spec_decode.bench_trees --rounds 3 [--device cuda] [--dtype bfloat16]

Runs the scheduler core and the worker in one process, alternating, and prints medians. Every third question runs alone,
then all 16 at once. On a GPU, where one thread waits for it, tokens per second are what counts; an uncounted first
round compiles kernels.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from quire.bench.workload.workloads import BenchRequest
from quire.services.worker.replica.replica import Replica
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build
from tools.bench import tiny_work

OFF = "off"


def beside_a_chain(depth: int) -> str:
    """Returns a chain with the second likeliest token as a sibling of each of its nodes."""
    return str([(0,) * above + (rank,) for above in range(depth) for rank in range(2)])


def cases() -> dict[str, dict[str, Any] | None]:
    found: dict[str, dict[str, Any] | None] = {OFF: None}
    for method, lengths, depths in (("eagle", (4, 8), (4, 8)), ("medusa", (4, 8), (4, 4))):
        for length, depth in zip(lengths, depths, strict=True):
            config = METHODS[method] | {"num_speculative_tokens": length}
            if length == depth:
                found[f"{method} chain of {length}"] = config
            found[f"{method} tree of {length}"] = config | {"speculative_token_tree": beside_a_chain(depth)}
    return found


class Measured(NamedTuple):
    us: float  # CPU time per token
    tokens_per_step: float  # of steps with drafts
    tokens_per_s: float  # wall-clock, including prompts


def run(replica: Replica, items: Sequence[BenchRequest], at_once: int) -> Measured:
    pair, started, began = Pair(replica), time.process_time(), time.perf_counter()
    for first in range(0, len(items), at_once):
        for item in items[first : first + at_once]:
            pair.ask(item.prompt, item.num_output, eos=())
        pair.run()
    used, seconds = time.process_time() - started, time.perf_counter() - began
    counts, num_tokens = pair.core.speculation.counts, sum(len(answer.tokens) for answer in pair.answers)
    per_step = 1 + counts.accepted_tokens / max(1, counts.drafts)
    return Measured(used / num_tokens * 1e6, per_step, num_tokens / seconds)


def compare(
    replicas: Mapping[str, Replica], items: Sequence[BenchRequest], at_once: int, rounds: int
) -> dict[str, Measured]:
    runs: dict[str, list[Measured]] = {name: [] for name in replicas}
    for _ in range(rounds):
        for name, replica in replicas.items():
            runs[name].append(run(replica, items, at_once))
    return {name: Measured(*map(statistics.median, zip(*each, strict=True))) for name, each in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    given = parser.parse_args()
    torch.set_num_threads(1)
    replicas = {name: build(config, device=given.device, dtype=given.dtype) for name, config in cases().items()}
    items = [item for work in tiny_work.CLASSES for item in tiny_work.work(work).items[:12]]
    for at_once, some in ((1, items[::3]), (16, items)):
        if given.device != "cpu":
            compare(replicas, some, at_once, 1)
        for name, (us, per_step, per_s) in compare(replicas, some, at_once, given.rounds).items():
            figures = f"{us:7.0f} us a token  {per_s:7.0f} tokens per second  {per_step:5.2f} tokens of a step"
            print(f"{at_once:2} at once  {name:18} {figures}", flush=True)


if __name__ == "__main__":
    main()
