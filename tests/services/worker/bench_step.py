"""What a steady decoding step costs beside the model and the choice: python -m tests.services.worker.bench_step 256"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from services.worker.replica import Replica
from shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker import checkpoints
from tests.services.worker.no_model import leave_out_forward
from tests.services.worker.plans import New, PaperScheduler
from tests.services.worker.rig import Rig

NUM_STEPS = 300
PROMPT = list(range(16))


def measure(replica: Replica, wire: bytes) -> tuple[float, ...]:
    """Seconds for decoding the plan, launch, result, record."""
    marks = [time.perf_counter()]
    plan = pb.StepPlan.FromString(wire)
    marks.append(time.perf_counter())
    flight = replica.launch(plan)
    marks.append(time.perf_counter())
    outcome = flight.launch.wait()
    flight.result(outcome, wait_us=0).SerializeToString()
    marks.append(time.perf_counter())
    replica.record(flight, outcome)
    marks.append(time.perf_counter())
    return tuple(np.diff(marks))


@torch.inference_mode()
def main(num_seqs: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        num_blocks, most = 40 * num_seqs, 16 * num_seqs
        made = checkpoints.make("qwen3-tied", Path(folder), max_position_embeddings=1024)
        rig = Rig(made.folder, block_size=16, num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=most)
    del rig.replica._runner.sampler.sample  # the recording one
    leave_out_forward(rig.replica)
    paper = PaperScheduler(16, num_blocks)
    plans = [paper.plan([New(slot, PROMPT) for slot in range(num_seqs)], dict.fromkeys(range(num_seqs), 16))]
    plans += [paper.plan() for _ in range(NUM_STEPS)]
    spans = np.array([measure(rig.replica, plan.SerializeToString()) for plan in plans][20:])
    decode, launch, result, record = np.median(spans, axis=0) * 1e6
    print(f"{num_seqs} sequences: {np.median(spans.sum(axis=1)) * 1e6:.0f} µs a step (medians of {len(spans)} steps):")
    print(f"  decode plan {decode:.0f}, slots + inputs + upload {launch:.0f}, result {result:.0f}, record {record:.0f}")


if __name__ == "__main__":
    main(int(sys.argv[1]))
