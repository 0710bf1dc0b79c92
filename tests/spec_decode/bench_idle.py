"""Measures the Python cost of steps without drafts, on a worker that could draft and on one that cannot ("off").

Run: python -m tests.spec_decode.bench_idle [--device cuda] [METHOD ...]

Connects a scheduler core and a worker replica by wire messages, with two steps in flight and equal requests to the
bundled model. Each method runs in its own process, since Python is slower if the same code handles objects of several
types. Prints medians in microseconds by kind of step: `plain` (one more token for all), `blocks` (some start a block),
`prompts`, and `drafts`, the few steps that try other lengths. On the CPU the forward pass is replaced by fixed tokens.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from quire.bench.report import Row, table
from quire.services.scheduler.replicas.codec import decode_result, encode_plan
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.replica.flight import StepInFlight
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.null_model import leave_out_forward
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Pair, build

OFF = "off"
IN_FLIGHT = 2
PROMPT_TOKENS, OUTPUT_TOKENS = 128, 512
BUDGET = 8192
WORKER = ("launch", "result", "record")
SCHEDULER = ("schedule", "encode", "decode", "apply")


@dataclass
class Step:
    kind: str
    took: dict[str, float]  # seconds by part of the step


class Drive:
    """Steps of a pair until all sequences have ended."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._airborne: deque[tuple[StepInFlight, Step]] = deque()

    def steps(self) -> Iterator[Step]:
        while self._pair.core.has_work or self._airborne:
            while len(self._airborne) < IN_FLIGHT:
                begun = time.perf_counter()
                plan = self._pair.core.schedule(begun)
                if plan is None:
                    break
                planned = time.perf_counter()
                wire = encode_plan(plan, epoch=1).plan
                took = {"schedule": planned - begun, "encode": time.perf_counter() - planned}
                while self._airborne and self._pair.replica.speculation.waits_before(decode_plan(wire)):
                    yield self._land()
                self._launch(wire, took)
            if self._airborne:
                yield self._land()

    def _launch(self, wire: pb.StepPlan, took: dict[str, float]) -> None:
        begun = time.perf_counter()
        flight = self._pair.replica.launch(decode_plan(wire))
        took["launch"] = time.perf_counter() - begun
        self._airborne.append((flight, Step(_kind(wire, flight), took)))

    def _land(self) -> Step:
        (flight, step), core, replica = self._airborne.popleft(), self._pair.core, self._pair.replica
        outcome = flight.launch.wait()
        marks = [time.perf_counter()]
        wire = encode_result(flight.result(outcome, wait_us=0))
        marks.append(time.perf_counter())
        replica.record(flight, outcome)
        marks.append(time.perf_counter())
        result = decode_result(wire)
        marks.append(time.perf_counter())
        core.apply(result, marks[-1])
        core.take_events()
        marks.append(time.perf_counter())
        step.took |= dict(zip(("result", "record", "decode", "apply"), np.diff(marks).tolist(), strict=True))
        return step


def _kind(wire: pb.StepPlan, flight: StepInFlight) -> str:
    if flight.inputs.drafts is not None:
        return "drafts"
    if flight.inputs.num_tokens > flight.inputs.num_samples:
        return "prompts"
    return "blocks" if wire.new_block_ids else "plain"


@torch.inference_mode()
def measure(method: str, device: str, num_seqs: int, rounds: int) -> list[Row]:
    """Runs several rounds; the first one is not counted."""
    config = None if method == OFF else METHODS[method] | {"adaptive_length": True}
    settings: dict[str, Any] = {"dtype": "auto"} if device == "cuda" else {}
    num_blocks = num_seqs * (PROMPT_TOKENS + OUTPUT_TOKENS) // 8
    replica = build(
        config, device=device, num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=BUDGET, **settings
    )
    if device == "cpu":
        made_up = torch.Generator().manual_seed(0)
        leave_out_forward(
            replica,
            lambda rows: torch.randint(3, replica.vocab_size, (rows,), generator=made_up, dtype=torch.int32),
        )
    pair, random = Pair(replica), np.random.default_rng(0)
    found: list[Step] = []
    rounds_s = []
    for number in range(1 + rounds):
        for _ in range(2 * num_seqs):
            pair.ask(random.integers(3, 900, PROMPT_TOKENS).tolist(), max_tokens=OUTPUT_TOKENS, eos=())
        begun = time.perf_counter()
        steps = list(Drive(pair).steps())
        if number:
            rounds_s.append(time.perf_counter() - begun)
            found += steps
    counts = Counter(step.kind for step in found)
    rows = [
        {"method": method, "kind": kind, "steps_a_round": counts[kind] / rounds, **_medians(found, kind)}
        for kind in ("plain", "blocks", "prompts", "drafts")
        if counts[kind]
    ]
    return [*rows, {"method": method, "kind": "all", "round_ms": 1e3 * float(np.median(rounds_s))}]


def _medians(steps: list[Step], kind: str) -> dict[str, float]:
    chosen = [step.took for step in steps if step.kind == kind]
    sums = {"worker": WORKER, "scheduler": SCHEDULER}
    parts = {f"{part}_us": 1e6 * float(np.median([took[part] for took in chosen])) for part in SCHEDULER + WORKER}
    return parts | {
        f"{name}_us": 1e6 * float(np.median([sum(took[part] for part in of) for took in chosen]))
        for name, of in sums.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.spec_decode.bench_idle", description=__doc__)
    parser.add_argument("methods", nargs="*", default=[OFF, *METHODS], metavar="METHOD")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--num-seqs", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    spawn = multiprocessing.get_context("spawn")
    rows = []
    for method in arguments.methods:
        with spawn.Pool(1) as process:
            rows += process.apply(measure, (method, arguments.device, arguments.num_seqs, arguments.rounds))
    print(table(rows))


if __name__ == "__main__":
    main()
