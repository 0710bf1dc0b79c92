"""Decode steps of one sequence on a CPU, shape by shape in turn: python -m tests.services.worker.bench_single SHAPE ...

SHAPE: one of quire.bench.workload.shapes with random weights. Every round takes one step of each, so that whatever else
the machine does falls on all of them. Processor time is that of all threads; those that wait for work count as well.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from quire.bench.workload import shapes
from quire.shared.pb.common.v1 import sampling_pb2
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

PROMPT = list(range(2, 130))
GREEDY = sampling_pb2.SamplingParams(temperature=0)
WARM = 3  # steps that do not count


def rig(shape: str, scratch: Path, threads: int, steps: int) -> Rig:
    folder = shapes.prepare(shape, scratch).folder
    assert folder is not None, shape
    length = len(PROMPT) + steps + WARM + 1
    made = Rig(
        folder, device="cpu", dtype="bfloat16", load_format="dummy", block_size=16, num_blocks=length // 16 + 3,
        max_num_seqs=4, max_num_batched_tokens=256, max_model_len=length, threads=threads, attention_backend="auto",
        record_logits=False,
    )  # fmt: skip
    made.step([New(0, PROMPT, sampling=GREEDY)], {0: len(PROMPT)})
    return made


def one(made: Rig) -> tuple[float, float]:
    """Milliseconds of a step: wall-clock time and processor time."""
    wall, used = time.perf_counter(), time.process_time()
    made.step()
    return (time.perf_counter() - wall) * 1e3, (time.process_time() - used) * 1e3


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.services.worker.bench_single", description=__doc__)
    parser.add_argument("shapes", nargs="+", help="the first is what others are compared with")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rigs = {shape: rig(shape, Path(scratch), options.threads, options.steps) for shape in options.shapes}
        taken: dict[str, list[tuple[float, float]]] = {shape: [] for shape in rigs}
        for _ in range(options.steps + WARM):
            for shape, made in rigs.items():
                taken[shape].append(one(made))
        first: list[float] = []
        for shape, times in taken.items():
            middle = [statistics.median(column) for column in zip(*times[WARM:], strict=True)]
            first = first or middle
            wall, used = middle
            print(
                f"{shape:28} {wall:7.1f} ms a step (x{first[0] / wall:.2f}), {1e3 / wall:5.1f} tokens/s; "
                f"processors {used:7.1f} ms (x{first[1] / used:.2f})"
            )


if __name__ == "__main__":
    main()
