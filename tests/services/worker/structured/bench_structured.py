"""Measures what constraints cost a worker.

Run: python -m tests.services.worker.structured.bench_structured [rows] [steps] [folder]

Runs decoding steps of `rows` sequences, each under a schema of its own, and the same steps without schemas. The replica
runs in this process, one step after the other, as the engine runs it on a CPU.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import statistics
import sys
import threading
import time
from pathlib import Path

import torch

from quire.services.worker.building.build import build_replica, open_grammars
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.structured.compile_pool import CompilePool, CompileResult
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.settings import WorkerSettings
from tests.services.worker.plans import New, PaperScheduler
from tools.bench.structured import schema

TINY = Path(__file__).parents[4] / "quire/tiny/model"
PROMPT = list(range(40, 72))
ROUNDS = 5
WARM = 10  # steps before the measurement


class Bench:
    """One replica; each run begins an epoch."""

    def __init__(self, folder: Path, rows: int, steps: int) -> None:
        self.rows, self.steps = rows, steps
        num_blocks = rows * (-(-(len(PROMPT) + steps) // 16) + 2)
        settings = WorkerSettings(
            model=str(folder), load_format="auto" if folder == TINY else "dummy", block_size=16, num_blocks=num_blocks,
            max_num_seqs=rows, max_num_batched_tokens=rows * len(PROMPT),
        )  # fmt: skip
        self.num_blocks = num_blocks
        self.grammars = CompilePool(lambda: open_grammars(settings))
        self.replica = build_replica(settings, self.grammars)

    def prepare(self) -> list[bytes]:
        """Compiles a grammar for each row."""
        names, done, slowest = [], threading.Semaphore(0), [0]

        def note(prepared: CompileResult) -> None:
            assert prepared.error is None, prepared.error
            slowest[0] = max(slowest[0], prepared.compile_us)
            done.release()

        started = time.perf_counter()
        for number in range(self.rows):
            constraint = sampling_pb2.StructuredOutput(json_schema=json.dumps(schema(number)))
            names.append(hashlib.sha256(constraint.SerializeToString()).digest())
            self.grammars.prepare(names[-1], constraint, note)
        for _ in names:
            done.acquire()
        total = time.perf_counter() - started
        print(f"{self.rows} schemas compiled in {total * 1e3:.1f} ms, the slowest in {slowest[0] / 1e3:.1f} ms")
        return names

    def run(self, grammars: list[bytes]) -> list[float]:
        """Returns the seconds of each decoding step."""
        self.replica.end_epoch()
        paper = PaperScheduler(16, self.num_blocks)
        new = [
            New(
                slot,
                PROMPT,
                sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=slot),
                eos=(0,),
                grammar_id=name,
            )
            for slot, name in enumerate(grammars)
        ]
        plans = [paper.plan(new, dict.fromkeys(range(self.rows), len(PROMPT)))]
        plans += [paper.plan() for _ in range(self.steps)]
        marks = []
        for plan in plans:
            flight = self.replica.launch(decode_plan(plan))
            outcome = flight.launch.wait()
            assert not encode_result(flight.result(outcome, 0)).failures
            self.replica.record(flight, outcome)
            marks.append(time.perf_counter())
        return [later - earlier for earlier, later in itertools.pairwise(marks[WARM:])]


def low(times: list[float]) -> float:
    """Returns the lower quartile: the time of a step on an otherwise idle machine."""
    return statistics.quantiles(times, n=4)[0]


@torch.inference_mode()
def main(rows: int = 64, steps: int = 200, folder: str = "") -> None:
    bench = Bench(Path(folder) if folder else TINY, rows, steps)
    names = bench.prepare()
    free: list[float] = []
    bound: list[float] = []
    for _ in range(ROUNDS):
        free += bench.run([b""] * rows)
        bound += bench.run(names)
    print(
        f"{rows} rows: a step takes {low(free) * 1e3:.2f} ms without schemas, {low(bound) * 1e3:.2f} with: "
        f"throughput {low(free) / low(bound) - 1:+.1%} (lower quartiles of {len(free)} steps)"
    )


if __name__ == "__main__":
    main(*(int(a) if a.isdigit() else a for a in sys.argv[1:]))
