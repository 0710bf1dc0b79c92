"""Trees of drafts against chains of as many: processor time for a token, and tokens of a step, on questions that
quire-tiny can answer.

    python -m tests.spec_decode.bench_trees --rounds 3

Scheduler's core and worker in one process, in turn; medians. Every third question one at a time, all 16 at once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from quire.bench.workload import tiny_work
from quire.bench.workload.workloads import Item
from services.worker.replica import Replica
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build

OFF = "off"


def beside_a_chain(depth: int) -> str:
    """A chain, with the second likeliest token beside each of its own."""
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


def run(replica: Replica, items: Sequence[Item], at_once: int) -> tuple[float, float]:
    """Microseconds of processor time for a token, and tokens of a step with drafts."""
    pair, started = Pair(replica), time.process_time()
    for first in range(0, len(items), at_once):
        for item in items[first : first + at_once]:
            pair.ask(item.prompt, item.num_output, eos=())
        pair.run()
    used, counts = time.process_time() - started, pair.core.speculation.counts
    num_tokens = sum(len(answer.tokens) for answer in pair.answers)
    return used / num_tokens * 1e6, 1 + counts.accepted_tokens / max(1, counts.drafts)


def compare(
    replicas: Mapping[str, Replica], items: Sequence[Item], at_once: int, rounds: int
) -> dict[str, tuple[float, float]]:
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in replicas}
    for _ in range(rounds):
        for name, replica in replicas.items():
            runs[name].append(run(replica, items, at_once))
    return {name: (statistics.median(us for us, _ in each), each[0][1]) for name, each in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    replicas = {name: build(config) for name, config in cases().items()}
    items = [item for work in tiny_work.CLASSES for item in tiny_work.work(work).items[:12]]
    for at_once, some in ((1, items[::3]), (16, items)):
        for name, (us, tokens) in compare(replicas, some, at_once, rounds).items():
            print(f"{at_once:2} at once  {name:18} {us:7.0f} us a token  {tokens:5.2f} tokens of a step", flush=True)


if __name__ == "__main__":
    main()
