"""Plans survive a round trip through the codec, and results match worker.proto."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.worker.codec.step_codec import decode_plan, encode_plan, encode_result
from quire.services.worker.device.step_timer import Timings
from quire.services.worker.step.plan import NO_CHANGES
from quire.services.worker.step.result import LogprobEntries, PooledColumns, PromptLogprobColumns, StepResult
from quire.shared.columns import ColumnError, f32_bytes, i32_bytes, u32_bytes
from quire.shared.errors import InvalidArgument, to_proto
from quire.shared.pb.common.v1 import media_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb

ADMISSION = pb.Admission(
    slot=3,
    token_ids=i32_bytes([5, 6, 7]),
    num_prompt_tokens=2,
    num_cached_tokens=1,
    params=b"params",
    sample=4,
    root_hash=b"r" * 32,
    grammar_id=b"g",
    prompt_logprobs_from=1,
    samples_nothing=True,
    query_id=b"q",
    is_query=True,
    num_logprobs=0,
    cross_block_ids=u32_bytes([3, 9]),
    writes_cross=True,
    media=[media_pb2.MediaItem(identifier=b"i" * 32, length=1, num_embeddings=9, is_attended=True)],
)
PLANS = {
    "nothing": {},
    "blocks": {"new_block_ids": u32_bytes([4, 9])},
    "blocks of slots": {"new_block_ids": u32_bytes([4]), "new_block_slots": u32_bytes([2])},
    "a micro batch": {"micro_batch": 1},
    "releases": {"released_slots": u32_bytes([0, 7])},
    "admissions": {"admitted": [ADMISSION, pb.Admission(slot=5)]},
    "counts": {"counted_slots": u32_bytes([1]), "token_counts": u32_bytes([16])},
    "no drafts from now on": {"num_draft_tokens": 0},
    "copies": {"copies": pb.BlockCopies(from_block_ids=u32_bytes([1, 2]), to_block_ids=u32_bytes([3, 4]))},
    "beams": {
        "beams": pb.BeamMoves(
            slots=u32_bytes([1, 2]),
            parents=u32_bytes([1, 1]),
            token_ids=i32_bytes([8, 9]),
            last_block_ids=u32_bytes([0, 6]),
        )
    },
    "dropped queries": {"dropped_queries": b"x" * 32},
}


@pytest.mark.parametrize("name", PLANS)
def test_other_ranks_get_the_plan_that_came(name: str) -> None:
    wire = pb.StepPlan(epoch=7, step_id=12, **PLANS[name])  # type: ignore[arg-type]
    assert encode_plan(decode_plan(wire)) == wire


def test_plan_with_all_changes_round_trips() -> None:
    wire = pb.StepPlan(epoch=7, step_id=12)
    for fields in PLANS.values():
        wire.MergeFrom(pb.StepPlan(**fields))  # type: ignore[arg-type]
    assert encode_plan(decode_plan(wire)) == wire


@pytest.mark.parametrize(("name", "changes"), [("nothing", False), ("blocks", False), ("counts", True)])
def test_plan_with_new_blocks_only_has_no_changes(name: str, changes: bool) -> None:
    plan = decode_plan(pb.StepPlan(epoch=7, step_id=12, **PLANS[name]))  # type: ignore[arg-type]
    assert (plan.changes is not NO_CHANGES) == changes


@pytest.mark.parametrize("field", ["new_block_ids", "released_slots", "counted_slots", "token_counts"])
def test_bytes_that_are_no_column_are_refused(field: str) -> None:
    with pytest.raises(ColumnError, match="3 bytes"):
        decode_plan(pb.StepPlan(epoch=7, step_id=12, **{field: b"abc"}))  # type: ignore[arg-type]


def test_result_encodes_all_outputs() -> None:
    entries = LogprobEntries(
        np.array([2], np.uint32),
        np.array([5, 6], np.int32),
        np.array([-0.5, -1.5], np.float32),
        np.array([1], np.uint32),
    )
    error = InvalidArgument("no", field="bad_words")
    result = StepResult(
        epoch=7,
        step_id=12,
        token_ids=np.array([5, 6, 7], np.int32),
        token_counts=np.array([1, 2], np.uint32),
        draft_counts=np.array([0, 3], np.uint32),
        failures=[(2, error)],
        wait_us=11,
        timings=Timings(1, 2, 3),
        logprobs=entries,
        prompt_logprobs=PromptLogprobColumns(np.array([4], np.uint32), np.array([1], np.uint32), entries),
        pooled=PooledColumns(np.array([9], np.uint32), np.array([2], np.uint32), np.array([0.5, 1], np.float32)),
    )
    columns = pb.LogprobColumns(
        entry_counts=u32_bytes([2]), token_ids=i32_bytes([5, 6]), logprobs=f32_bytes([-0.5, -1.5]), ranks=u32_bytes([1])
    )
    assert encode_result(result) == pb.StepResult(
        epoch=7,
        step_id=12,
        token_ids=i32_bytes([5, 6, 7]),
        token_counts=u32_bytes([1, 2]),
        draft_counts=u32_bytes([0, 3]),
        failures=[pb.SlotFailure(slot=2, error=to_proto(error))],
        timings=pb.StepTimings(wait_us=11, prepare_us=1, forward_us=2, sample_us=3),
        logprobs=columns,
        prompt_logprobs=pb.PromptLogprobColumns(slots=u32_bytes([4]), position_counts=u32_bytes([1]), entries=columns),
        pooled=pb.PooledColumns(slots=u32_bytes([9]), sizes=u32_bytes([2]), values=f32_bytes([0.5, 1])),
    )


def test_a_step_without_a_device_has_no_timings() -> None:
    result = StepResult(7, 12, np.zeros(0, np.int32), None, None, [], wait_us=0)
    assert encode_result(result) == pb.StepResult(epoch=7, step_id=12)
