"""Measures the cost of batch_invariant on the CPU: steps of 32 sequences of quire-tiny with and without it,
alternating.

Run: python -m tests.batch_invariance.bench
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from quire.services.worker.replica.flight import StepInFlight
from quire.services.worker.replica.replica import Replica
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions

ROUNDS = 9
NUM_SEQUENCES = 32
WARM_UP = 8  # steps, including those of prompts


def step_times(replica: Replica, sampling: dict[str, Any]) -> list[float]:
    """Returns the microseconds of each launch, which on the CPU is the whole step."""
    pair, prompts = Pair(replica), questions()
    for i in range(NUM_SEQUENCES):
        pair.ask(prompts[i % len(prompts)][:60], 60, eos=(), **sampling)
    launch, times = replica.launch, []

    def timed(plan: Any) -> StepInFlight:
        begin = time.perf_counter()
        flight = launch(plan)
        times.append(1e6 * (time.perf_counter() - begin))
        return flight

    replica.launch = timed  # type: ignore[method-assign]
    try:
        pair.run()
    finally:
        replica.launch = launch  # type: ignore[method-assign]
    return times[WARM_UP:]


def main() -> None:
    ways = {"off": False, "on": True, "off again": False}
    replicas = {
        name: build(dtype="bfloat16", threads=2, max_num_seqs=NUM_SEQUENCES, batch_invariant=on)
        for name, on in ways.items()
    }
    for sampling in ({}, {"logprobs": 5}, {"logprobs": 20}):
        times: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(ROUNDS * len(ways)):
            name = list(ways)[(turn + turn // len(ways)) % len(ways)]
            times[name] += step_times(replicas[name], sampling)
        print(sampling or "no logprobs", {name: f"{statistics.median(found):,.0f} us" for name, found in times.items()})


if __name__ == "__main__":
    main()
