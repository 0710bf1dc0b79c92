"""CPU cost of planning a step: the core and its codec without workers. `quire bench scheduler` prints it.

Two steps are in flight at a time, as in service. steady: all sequences decode. churn: each sequence lives 64 steps, so
that every step ends a 64th of them and as many new ones arrive.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from time import thread_time

import numpy as np

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import StepPlan
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.services.scheduler.replicas.codec import decode_result, encode_plan
from quire.services.scheduler.values.payload import Payload
from quire.shared.columns import i32_bytes
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process import garbage

BLOCK_SIZE = 16
PROMPT = 64  # tokens; up to a block more, so that not all sequences need a new block in the same step
LIFE = 64  # steps of a sequence in churn
WARMUP = LIFE + 16  # steps
STEP_S = 0.01  # of the simulated clock
EPOCH = 1
EOS = 1
MICROSECONDS = 1e6


@dataclass(frozen=True, slots=True)
class PlanCost:
    """CPU seconds of one step, and the size of its plan on the wire."""

    decode: float
    apply: float
    schedule: float
    encode: float
    plan_bytes: int

    @property
    def total(self) -> float:
        return self.schedule + self.apply


def measure(running: int, mode: str, steps: int, runs: int) -> dict[str, float | int | str]:
    """Measures `runs` runs of the same `steps` steps at `running` sequences. Returns microseconds: the medians over
    runs of the median step, and as `p99_us` the 99th percentile of schedule plus apply with each step at its best over
    all runs, which excludes disturbances by the machine but not by Python."""
    results = [_run(running, mode, steps) for _ in range(runs)]
    row = {f"{verb}_us": _median_us(results, attrgetter(verb)) for verb in ("schedule", "apply", "encode", "decode")}
    best = sorted(min(step.total for step in one_step) for one_step in zip(*results, strict=True))
    return {
        "running": running,
        "mode": mode,
        **row,
        "total_us": _median_us(results, attrgetter("total")),
        "p99_us": best[len(best) * 99 // 100] * MICROSECONDS,
        "plan_bytes": round(statistics.median(step.plan_bytes for step in results[0])),
    }


def _run(running: int, mode: str, steps: int) -> list[PlanCost]:
    """Runs WARMUP steps, then returns the costs of `steps` further ones, with the garbage collector set as in the
    service."""
    load = SimulatedLoad(running, LIFE if mode == "churn" else steps + 2 * WARMUP)
    with garbage.service_gc_thresholds():
        for _ in range(WARMUP):
            load.step()
        return [load.step() for _ in range(steps)]


def _median_us(runs: list[list[PlanCost]], seconds: Callable[[PlanCost], float]) -> float:
    return statistics.median_low([statistics.median(map(seconds, steps)) for steps in runs]) * MICROSECONDS


class SimulatedLoad:
    """Core kept at a constant number of sequences, with a worker that returns random tokens."""

    def __init__(self, running: int, life: int) -> None:
        """Fills a core with `running` sequences and plans the first steps. `life`: output tokens of each sequence;
        short lives are staggered, so that every step ends some."""
        self._core = Core(_limits(running, life))
        self._life = life
        self._now = 0.0
        self._random = np.random.default_rng(0)
        self._sequences = self._new_sequences()
        for i in range(running):
            first_life = life if life > LIFE else 1 + i % LIFE
            self._core.add(self._sequence(i, first_life))
        while self._core.schedule(self._now) is not None:
            pass

    def step(self) -> PlanCost:
        """Applies the result of the oldest step in flight, replaces finished sequences by new ones and plans the
        next step; returns the CPU cost, without that of adding sequences."""
        core, wire = self._core, self._result()
        self._now += STEP_S
        begin = thread_time()
        result = decode_result(pb.AttachRequest.FromString(wire).result)
        decoded = thread_time()
        core.apply(result, self._now)
        events = core.take_events()
        applied = thread_time()
        for _ in events.finished:
            core.add(next(self._sequences))
        added = thread_time()
        plan = core.schedule(self._now)
        scheduled = thread_time()
        size = self._encoded_size(plan)
        return PlanCost(decoded - begin, applied - decoded, scheduled - added, thread_time() - scheduled, size)

    def _encoded_size(self, plan: StepPlan | None) -> int:
        assert plan is not None, "there is always work"
        return len(encode_plan(plan, EPOCH).SerializeToString())

    def _result(self) -> bytes:
        """Encodes a worker's result of the oldest step in flight: one random token for each slot that samples."""
        flight = self._core.steps_in_flight[0]
        tokens = self._random.integers(100, 1000, len(flight.slots), dtype=np.int32)
        result = pb.StepResult(epoch=EPOCH, step_id=flight.step_id, token_ids=tokens.tobytes())
        return pb.AttachRequest(result=result).SerializeToString()

    def _new_sequences(self) -> Iterator[Sequence]:
        """Yields sequences with ascending keys without end."""
        key = self._core.limits.max_num_seqs
        while True:
            yield self._sequence(key, self._life)
            key += 1

    def _sequence(self, key: int, num_output: int) -> Sequence:
        """Creates a sequence with a prompt of its own, of PROMPT to PROMPT + BLOCK_SIZE - 1 tokens, that ends after
        `num_output` output tokens."""
        num_prompt = PROMPT + key % BLOCK_SIZE
        tokens = i32_bytes([key, *range(num_prompt - 1)])
        root = block_hash.root_hash()
        sampling = sampling_pb2.SamplingParams(temperature=0.6, max_tokens=num_output, seed=key)
        params = pb.SequenceParams(sampling=sampling, eos_token_ids=i32_bytes([EOS])).SerializeToString()
        return Sequence(
            key=key,
            owner=0,
            sequence_id=key,
            tokens=SequenceTokens(tokens),
            num_prompt_tokens=num_prompt,
            max_total_tokens=num_prompt + num_output,
            eos_token_ids=(EOS,),
            root_hash=root,
            block_hashes=block_hash.chain(root, tokens, BLOCK_SIZE),
            payload=Payload(params),
        )


def _limits(running: int, life: int) -> CoreLimits:
    """Returns limits under which slots, tokens and blocks never run short."""
    longest = PROMPT + BLOCK_SIZE + life
    return CoreLimits(
        num_blocks=2 * running * -(-longest // BLOCK_SIZE) + 1,
        block_size=BLOCK_SIZE,
        max_num_seqs=running,
        max_num_batched_tokens=running * (PROMPT + BLOCK_SIZE),
        max_model_len=longest + 1,
    )
