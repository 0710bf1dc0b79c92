"""Plain values passed in process equal those decoded from the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from quire.services.in_process.steps import EPOCH, plan_for_worker, result_for_core
from quire.services.scheduler.core.plan import Admission, BeamMove, StepPlan
from quire.services.scheduler.core.sequences.sequence import Sequence as CoreSequence
from quire.services.scheduler.replicas import codec
from quire.services.scheduler.values.payload import Payload
from quire.services.worker.codec.step_codec import encode_plan, encode_result
from quire.services.worker.step.result import LogprobEntries, PooledColumns, PromptLogprobColumns, StepResult
from quire.shared.columns import i32_bytes
from quire.shared.errors import Internal, ResourceExhausted


def admission(slot: int, tokens: Sequence[int], payload: Payload, **fields: Any) -> Admission:
    column = i32_bytes(tokens)
    sequence = CoreSequence(
        key=slot,
        owner=0,
        sequence_id=slot,
        tokens=bytearray(column),
        num_prompt_tokens=len(tokens),
        max_total_tokens=len(tokens) + 4,
        root_hash=b"r" * 32,
        payload=payload,
        **fields,
    )
    return Admission(slot, sequence, column, 1)


PLANS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "blocks": {"new_block_ids": [3, 9]},
    "blocks of slots": {"new_block_ids": [3], "new_block_slots": [1]},
    "releases": {"released_slots": [0, 4]},
    "counts": {"counted_slots": [2], "token_counts": [16]},
    "no drafts from now on": {"num_draft_tokens": 0},
    "copies": {"copies": [(1, 2), (3, 4)]},
    "beams": {"beam_moves": [BeamMove(1, 1, 7, (0, 0)), BeamMove(2, 1, 8, (5, 6))]},
    "dropped queries": {"dropped_queries": [b"a" * 32, b"b" * 32]},
    "admissions": {
        "admitted": [
            admission(0, [1, 2, 3], Payload(b"params", 2), grammar_id=b"g", prompt_logprobs_from=1),
            admission(1, [4, 5], Payload(b"others", num_logprobs=3), samples_nothing=True),
        ]
    },
}


def plan(**fields: Any) -> StepPlan:
    lists = ("released_slots", "admitted", "counted_slots", "token_counts", "new_block_ids")
    return StepPlan(step_id=5, num_tokens=0, **({name: [] for name in lists} | fields))


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_equals_the_one_decoded_from_the_wire(name: str) -> None:
    wire = codec.encode_plan(plan(**PLANS[name]), EPOCH).plan
    for admitted in wire.admitted:
        admitted.ClearField("sequence_key")  # read by no worker
    assert encode_plan(plan_for_worker(plan(**PLANS[name]))) == wire


def test_a_result_equals_the_one_decoded_from_the_wire() -> None:
    entries = LogprobEntries(
        np.array([2, 1], np.uint32),
        np.array([5, 6, 7], np.int32),
        np.array([-0.5, -1.5, -2], np.float32),
        np.array([1, 9], np.uint32),
    )
    result = StepResult(
        epoch=EPOCH,
        step_id=5,
        token_ids=np.array([5, 6, 7], np.int32),
        token_counts=np.array([1, 2], np.uint32),
        draft_counts=np.array([0, 3], np.uint32),
        failures=[(2, Internal("broken")), (3, ResourceExhausted("full", retry_after_ms=20))],
        wait_us=0,
        logprobs=entries,
        prompt_logprobs=PromptLogprobColumns(np.array([4], np.uint32), np.array([2], np.uint32), entries),
        pooled=PooledColumns(
            np.array([6, 9], np.uint32), np.array([2, 1], np.uint32), np.array([0.5, 1, 3], np.float32)
        ),
    )
    direct, sent = result_for_core(result), codec.decode_result(encode_result(result))
    assert repr(direct) == repr(sent)


def test_a_result_with_tokens_alone_has_no_other_columns() -> None:
    result = StepResult(EPOCH, 5, np.array([5], np.int32), None, None, [], wait_us=0)
    assert repr(result_for_core(result)) == repr(codec.decode_result(encode_result(result)))
