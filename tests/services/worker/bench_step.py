"""What a steady decoding step costs beside the model and the choice: python -m tests.services.worker.bench_step 256

With --bytecodes in the interpreter's instructions, which are the same on a busy machine; time does not follow from
them alone, for an instruction may call numpy.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.replica.replica import Replica
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker import checkpoints
from tests.services.worker.null_model import leave_out_forward
from tests.services.worker.plans import New, PaperScheduler
from tests.services.worker.replica_internals import runner_of
from tests.services.worker.rig import Rig

NUM_STEPS = 300
WARMUP = 20
PROMPT = list(range(16))


class Bytecodes:
    """Counts the bytecodes of the functions called while it traces."""

    def __init__(self) -> None:
        self._num = 0

    def read(self) -> float:
        return self._num

    def trace(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            self._num += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self.trace


def measure(replica: Replica, wire: bytes, read: Callable[[], float]) -> tuple[float, ...]:
    """Measures decoding the plan, launch, result and record with `read`."""
    marks = [read()]
    plan = decode_plan(pb.StepPlan.FromString(wire))
    marks.append(read())
    flight = replica.launch(plan)
    marks.append(read())
    outcome = flight.launch.wait()
    encode_result(flight.result(outcome, wait_us=0)).SerializeToString()
    marks.append(read())
    replica.record(flight, outcome)
    marks.append(read())
    return tuple(np.diff(marks))


@torch.inference_mode()
def main(num_seqs: int, *, bytecodes: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        num_blocks, most = 40 * num_seqs, 16 * num_seqs
        made = checkpoints.make("qwen3-tied", Path(folder), max_position_embeddings=1024)
        rig = Rig(made.folder, block_size=16, num_blocks=num_blocks, max_num_seqs=num_seqs, max_num_batched_tokens=most)
    del runner_of(rig.replica).sampler.sample  # the recording one
    leave_out_forward(rig.replica)
    paper = PaperScheduler(16, num_blocks)
    plans = [paper.plan([New(slot, PROMPT) for slot in range(num_seqs)], dict.fromkeys(range(num_seqs), 16))]
    plans += [paper.plan() for _ in range(NUM_STEPS)]
    read: Callable[[], float] = lambda: time.perf_counter() * 1e6  # noqa: E731
    if bytecodes:
        counter = Bytecodes()
        read = counter.read
        sys.settrace(counter.trace)
    spans = np.array([measure(rig.replica, plan.SerializeToString(), read) for plan in plans])[WARMUP:]
    sys.settrace(None)
    middle, unit = (np.mean, "bytecodes") if bytecodes else (np.median, "µs")
    decode, launch, result, record = middle(spans, axis=0)
    of_step, name = middle(spans.sum(axis=1)), middle.__name__
    print(f"{num_seqs} sequences: {of_step:.0f} {unit} a step ({name}s of {len(spans)} steps):")
    print(f"  decode plan {decode:.0f}, slots + inputs + upload {launch:.0f}, result {result:.0f}, record {record:.0f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("num_seqs", type=int)
    parser.add_argument("--bytecodes", action="store_true")
    arguments = parser.parse_args()
    main(arguments.num_seqs, bytecodes=arguments.bytecodes)
