"""Warms up steps with drafts, so that everything compiled or loaded at first calls is ready before the first request.

On a GPU the first steps with drafts took 0.7 s each, in which no sequence got a token, and a rule that judges drafts by
step times learned from that.
"""

from __future__ import annotations

import time

import numpy as np

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.replica.replica import Replica
from quire.services.worker.spec_decode.speculation import Speculation
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.plan import Admission, PlanChanges, StepPlan
from quire.shared import columns
from quire.shared.kv import block_hash
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("worker.rehearsal")

SIZES = (1, 2, 16)  # sequences: kernels are specialized for 1, multiples of 16, and others
PROMPT = [1, 2] * 4
TOKENS = len(PROMPT) + 3  # room for the tokens of two steps with drafts
SAMPLINGS = [
    sampling_pb2.SamplingParams(temperature=0.0),
    sampling_pb2.SamplingParams(temperature=1.0, seed=1),
]


def warm_up_drafts(replica: Replica, speculation: Speculation) -> None:
    """Runs steps with drafts for 1, 2 and 16 sequences, as far as the limits allow; ends the epoch and resets the
    prefix cache afterwards, so that the replica is as it was."""
    started = time.perf_counter()
    longest = TOKENS + 2 * (1 + speculation.num_speculative_tokens)
    for size in SIZES:
        if _fits(replica.limits, size, longest):
            _run(replica, speculation, size, longest)
            replica.end_epoch()
    replica.reset_cache()
    log.info("drafter warmed up", seconds=round(time.perf_counter() - started, 2))


def _fits(limits: WorkerLimits, size: int, longest: int) -> bool:
    """Returns whether `size` sequences of `longest` tokens fit into blocks, slots, positions and one step."""
    blocks = size * _blocks_of(limits, longest)
    room = blocks < limits.num_blocks and longest <= limits.max_model_len
    return room and size <= limits.max_num_seqs and size * longest <= limits.max_num_batched_tokens


def _blocks_of(limits: WorkerLimits, num_tokens: int) -> int:
    """Returns the blocks of one sequence, over all KV groups."""
    return -(-num_tokens // limits.block_size) * limits.num_groups


def _run(replica: Replica, speculation: Speculation, size: int, longest: int) -> None:
    """Runs three steps of `size` sequences: their prompts, then one with proposed drafts, then one with a forced draft
    each; leaves the sequences in their slots."""
    slots = np.arange(size)
    owners = np.repeat(slots, _blocks_of(replica.limits, longest))
    changes = PlanChanges(
        admitted=[_admission(slot, SAMPLINGS[(slot + size) % len(SAMPLINGS)]) for slot in range(size)],
        counted_slots=slots.astype(np.uint32),
        token_counts=np.full(size, len(PROMPT), dtype=np.uint32),
        num_draft_tokens=speculation.num_speculative_tokens,
    )
    blocks = np.arange(1, 1 + len(owners), dtype=np.uint32)
    _step(replica, StepPlan(0, 1, blocks, owners.astype(np.uint32), changes=changes))
    _step(replica, StepPlan(0, 2))
    slots = slots[speculation.table.max_drafts(slots) > 0]
    if len(slots):
        ones = np.ones(len(slots), dtype=np.int32)
        speculation.force_drafts(Drafts(slots, ones, ones))
    _step(replica, StepPlan(0, 3))


def _admission(slot: int, sampling: sampling_pb2.SamplingParams) -> Admission:
    """Returns the admission of the test prompt to `slot` with these sampling parameters."""
    return Admission(
        slot=slot,
        token_ids=columns.i32_bytes(PROMPT),
        num_prompt_tokens=len(PROMPT),
        params=pb.SequenceParams(sampling=sampling).SerializeToString(),
        root_hash=block_hash.root_hash(),
    )


def _step(replica: Replica, plan: StepPlan) -> None:
    """Launches a plan, waits for its result and records it."""
    flight = replica.launch(plan)
    replica.record(flight, flight.launch.wait())
