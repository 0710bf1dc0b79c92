"""Steps of one worker on a GPU, without the other services: python -m tests.services.worker.bench_gpu SHAPE [CASE ...]

SHAPE: one of quire.bench.workload.shapes with random weights. Plans are made beforehand; steps are launched `--depth`
ahead of what has been waited for, as the engine does it. `--profile`: also where the GPU's time goes in the last steps.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from quire.bench.workload import shapes
from quire.services.worker.building.build import build_replica
from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.replica.replica import Replica
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings
from tests.services.worker.plans import New, PaperScheduler

SAMPLING = sampling_pb2.SamplingParams(temperature=0.6, seed=1)
BUDGET = 8192
DECODES = [(1, 512), (8, 512), (32, 512), (128, 512), (256, 384), (256, 1024)]


@dataclass
class Steps:
    """Plans, and the number of plans before the measured ones."""

    name: str
    plans: list[pb.StepPlan]
    num_before: int
    num_tokens: int  # that the measured ones give or take in


def prompt(count: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 10_000, count).tolist()


def admit(paper: PaperScheduler, prompts: list[list[int]], cached: tuple[int, ...] = ()) -> Iterator[pb.StepPlan]:
    """Plans chunks of at most BUDGET tokens a step, into slots from 0, or after the existing ones."""
    first, left, new, counts = len(paper.rows), BUDGET, [], dict.fromkeys(paper.rows, 0)
    for slot, tokens in enumerate(prompts, first):
        rest = len(tokens) - len(cached) * paper.block_size
        new.append(New(slot, tokens, cached_blocks=cached, sampling=SAMPLING))
        while rest:
            counts[slot] = take = min(rest, left)
            rest, left = rest - take, left - take
            if not left:
                yield paper.plan(new, counts)
                new, counts, left = [], dict.fromkeys(paper.rows, 0), BUDGET
    if new:
        yield paper.plan(new, counts)


def decode(rows: int, length: int, steps: int = 100) -> Callable[[PaperScheduler], Steps]:
    def make(paper: PaperScheduler) -> Steps:
        plans = list(admit(paper, [prompt(length - 50, i) for i in range(rows)]))
        before = len(plans) + 50
        plans += [paper.plan() for _ in range(50 + steps)]
        return Steps(f"decode {rows} x {length}", plans, before, rows * steps)

    return make


def shared(rows: int = 256, steps: int = 63) -> Callable[[PaperScheduler], Steps]:
    def make(paper: PaperScheduler) -> Steps:
        head = prompt(2048, 0)
        plans = list(admit(paper, [head]))
        blocks = tuple(paper.rows[0].blocks[: 2048 // paper.block_size])
        plans += admit(paper, [[*head, *prompt(64, i)] for i in range(1, rows)], blocks)
        before = len(plans) + 5
        plans += [paper.plan() for _ in range(5 + steps)]
        return Steps(f"decode {rows} behind 2048 shared", plans, before, rows * steps)

    return make


def prefill(rows: int = 16, length: int = 4096) -> Callable[[PaperScheduler], Steps]:
    def make(paper: PaperScheduler) -> Steps:
        plans = list(admit(paper, [prompt(length, i) for i in range(rows)]))
        return Steps(f"prefill {rows} x {length}", plans, 2, (len(plans) - 2) * BUDGET)

    return make


def chunks(rows: int, length: int, steps: int = 60) -> Callable[[PaperScheduler], Steps]:
    """Sequences that decode, and in every step a prompt that ends with it."""

    def make(paper: PaperScheduler) -> Steps:
        plans = list(admit(paper, [prompt(300, i) for i in range(rows)]))
        before, released = len(plans) + 10, []
        for i in range(10 + steps):
            plans.append(paper.plan([New(rows, prompt(length, i), sampling=SAMPLING)], {rows: length}, released))
            paper.free[:0] = paper.rows[rows].blocks[::-1]
            released = [rows]
        return Steps(f"{rows} decodes, a prompt of {length}", plans, before, steps * (rows + length))

    return make


CASES: dict[str, list[Callable[[PaperScheduler], Steps]]] = {
    "decode": [decode(rows, length) for rows, length in DECODES],
    "single": [decode(1, 640, 256)],
    "shared": [shared()],
    "prefill": [prefill()],
    "chunks": [chunks(rows, length) for rows, length in ((1, 30), (8, 110), (50, 200), (50, 450), (200, 800))],
}


class Bench:
    """One replica for all cases, each of which starts an epoch."""

    def __init__(self, shape: str, **settings: object) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            folder = shapes.prepare(shape, Path(scratch)).folder
            started = time.perf_counter()
            self.replica: Replica = build_replica(
                WorkerSettings(model=str(folder), device="cuda", load_format="dummy", max_model_len=8192, **settings)
            )
        print(f"{shape}: built in {time.perf_counter() - started:.1f} s", flush=True)

    def run(self, make: Callable[[PaperScheduler], Steps], depth: int) -> None:
        self.replica.end_epoch()
        limits = self.replica.limits
        steps = make(PaperScheduler(limits.block_size, min(limits.num_blocks, 20_000)))
        launches, waits = self._execute(steps, depth)
        seconds = waits[-1] - waits[steps.num_before - 1]
        count = len(steps.plans) - steps.num_before
        print(
            f"{steps.name:32} depth {depth}: {seconds / count * 1e3:7.3f} ms a step, {steps.num_tokens / seconds:9.0f} "
            f"tokens/s; python {statistics.median(launches[steps.num_before :]) * 1e6:5.0f} us a launch",
            flush=True,
        )

    def _execute(self, steps: Steps, depth: int) -> tuple[list[float], list[float]]:
        """Returns the seconds of each launch, and the times at which each step had ended."""
        launches, waits, flights = [], [], deque()

        def land() -> None:
            flight = flights.popleft()
            self.replica.record(flight, flight.launch.wait())
            waits.append(time.perf_counter())

        for plan in steps.plans:
            if len(flights) == depth:
                land()
            started = time.perf_counter()
            flights.append(self.replica.launch(decode_plan(plan)))
            launches.append(time.perf_counter() - started)
        while flights:
            land()
        return launches, waits

    def profile(self, make: Callable[[PaperScheduler], Steps]) -> None:
        self.replica.end_epoch()
        steps = make(PaperScheduler(self.replica.limits.block_size, 20_000))
        last = Steps(steps.name, steps.plans[-5:], 0, 0)
        self._execute(Steps(steps.name, steps.plans[:-5], 0, 0), 1)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            self._execute(last, 1)
        times: dict[str, list[float]] = {}
        for event in profiler.events():
            times.setdefault(event.name[:70], []).append(event.device_time_total)
        total = sum(map(sum, times.values()))
        print(f"{steps.name}: {total / 5:.0f} us of kernels a step")
        for name, spans in sorted(times.items(), key=lambda item: -sum(item[1]))[:14]:
            print(f"  {sum(spans) / 5:8.1f} us in {len(spans) / 5:5.1f} x {statistics.median(spans):7.2f}  {name}")


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.services.worker.bench_gpu", description=__doc__)
    parser.add_argument("shape", choices=list(shapes.CONFIGS))
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of the worker")
    options = parser.parse_args()
    bench = Bench(options.shape, **dict(pair.split("=", 1) for pair in options.set))
    for case in options.cases:
        for make in CASES[case]:
            bench.run(make, options.depth)
            if options.profile:
                bench.profile(make)


if __name__ == "__main__":
    main()
