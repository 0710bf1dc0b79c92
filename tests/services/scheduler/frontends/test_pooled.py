"""Vectors in results, and pooling submissions: what is accepted, refused and delivered."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.step.plan_builder import NO_SLOTS, InFlightStep
from quire.services.scheduler.frontends.batches import OwnerBatches
from quire.services.scheduler.frontends.submission_checks import refusal
from quire.services.scheduler.frontends.submissions import SequenceFactory
from quire.services.scheduler.replicas.codec import decode_result
from quire.services.scheduler.replicas.result_checks import ResultChecks
from quire.shared.columns import f32, f32_bytes, u32, u32_bytes
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.common.v1 import model_pb2, sampling_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.pb.scheduler.v1.scheduler_pb2 import LateQuery
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.conftest import make_limits, make_sequence

HELLO = pb.WorkerHello(model=model_pb2.ModelIdentity(vocab_size=50), limits=pb.StepLimits(max_num_seqs=8))
ENDING = InFlightStep(
    1, NO_SLOTS, NO_SLOTS.astype(np.int64), NO_SLOTS.astype(bool), {}, 9, 9, 0.0, pooled_keys={2: 5, 4: 6}
)


def result(slots: list[int], sizes: list[int], values: list[float], *failed: int) -> pb.StepResult:
    pooled = pb.PooledColumns(slots=u32_bytes(slots), sizes=u32_bytes(sizes), values=f32_bytes(values))
    return pb.StepResult(step_id=1, pooled=pooled, failures=[pb.SlotFailure(slot=slot) for slot in failed])


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (pb.StepResult(step_id=1), r"vectors of slots \[2, 4\] are due"),
        (result([2], [1], [1.0]), "the worker sent those of"),
        (result([2, 4, 5], [1, 1, 1], [1.0] * 3), "are due"),
        (result([2, 2], [1, 1], [1.0] * 2), "are due"),
        (result([2, 4], [1], [1.0]), "pooled.sizes: 2 are due"),
        (result([2, 4], [1, 0], [1.0]), "pooled.sizes: 1 to"),
        (result([2, 4], [1, 2**31], [1.0]), "pooled.sizes: 1 to"),
        (result([2, 4], [1, 2], [1.0, 2.0]), "pooled.values: 3 are due"),
        (result([2, 4], [1, 1], [1.0, 2.0], 3), "failures"),
    ],
)
def test_invalid_vectors_are_refused(wire: pb.StepResult, text: str) -> None:
    with pytest.raises(FailedPrecondition, match=text):
        ResultChecks(HELLO).check(wire, ENDING)


@pytest.mark.parametrize(
    ("wire", "text"),
    [
        (result([2, 4], [1, 1], [1.0, 2.0]), r"vectors of slots \[4\] are due, the worker sent those of \[2, 4\]"),
        (result([4], [3], [1.0, 2.0, 3.0]), "1 element of the document in slot 4, the worker sent 3"),
        (pb.StepResult(step_id=1), r"vectors of slots \[4\] are due, the worker sent those of \[\]"),
    ],
)
def test_a_query_returns_no_vector_and_a_document_one_number(wire: pb.StepResult, text: str) -> None:
    late = replace(ENDING, late_queries={2: True, 4: False})
    ResultChecks(HELLO).check(result([4], [1], [1.0]), late)
    with pytest.raises(FailedPrecondition, match=text):
        ResultChecks(HELLO).check(wire, late)


def test_vectors_are_returned_for_all_slots_that_did_not_fail() -> None:
    ResultChecks(HELLO).check(result([2, 4], [1, 2], [1.0, 2.0, 3.0]), ENDING)
    wire = result([2], [3], [1.0, 2.0, 3.0], 4)
    ResultChecks(HELLO).check(wire, ENDING)
    assert {slot: f32(column).tolist() for slot, column in decode_result(wire).pooled.items()} == {2: [1.0, 2.0, 3.0]}


def test_a_prompt_ends_once_with_its_vector() -> None:
    """The prompt has the model's maximum length: no token follows it."""
    core = Core(make_limits(max_model_len=20, max_num_batched_tokens=16))
    core.add(make_sequence(7, list(range(20)), 0, samples_nothing=True))
    first = core.schedule(0)
    assert first is not None
    core.apply(decode_result(pb.StepResult(step_id=1)), 0)
    second = core.schedule(0)
    assert second is not None
    assert (first.token_counts, second.token_counts) == ([16], [4])
    assert core.schedule(0) is None
    wire = result([0], [2], [1.5, 2.5])
    wire.step_id = 2
    core.apply(decode_result(wire), 0)
    batches = OwnerBatches()
    events = core.take_events()
    assert [finished.reason for finished in events.finished] == [Reason.STOP]
    batches.add(events)
    (message,) = batches.by_owner[0]
    assert u32(message.tokens.pooled.sequence_ids).tolist() == [7]
    assert f32(message.tokens.pooled.values).tolist() == [1.5, 2.5]
    assert not message.tokens.sequence_ids
    assert not core.has_work
    assert core.use.used == 0


def test_a_query_name_covers_all_inputs_and_the_tenant() -> None:
    same = {"token_ids": bytes(8), "num_prompt_tokens": 2, "num_sequences": 1, "root_hash": bytes(32), "tenant": "a"}
    others: list[dict[str, object]] = [
        {"late_query": LateQuery(token_ids=bytes(8))},
        {"late_query": LateQuery(token_ids=bytes(4), params=b"x")},
        {"tenant": "b"},
        {"root_hash": b"1" * 32},
        {"adapter": "pirate"},
        {"adapter": "pirate", "adapter_digest": b"2" * 32},
    ]
    names = []
    for fields in ({}, {"token_ids": bytes(4), "num_prompt_tokens": 1}, *others):
        values = {**same, "late_query": LateQuery(token_ids=bytes(4)), **fields}
        (made,) = SequenceFactory().sequences(scheduler_pb2.Submission(**values), 0, 0.0)
        assert made.query is not None
        names.append(made.query.name)
    assert names[0] == names[1], "documents of one query share it"
    assert len({*names}) == 1 + len(others)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": 1}, "samples_nothing: goes with max_tokens 0"),
        ({"num_sequences": 2}, "samples_nothing: goes with max_tokens 0"),
        ({"grammar": b"x"}, "samples_nothing: has no output"),
        ({"beam_search": sampling_pb2.BeamSearch(width=2)}, "samples_nothing: has no output"),
        ({"samples_nothing": False}, "max_tokens: must be at least 1"),
        ({"late_query": LateQuery(token_ids=bytes(8))}, ""),
        (
            {"late_query": LateQuery(token_ids=bytes(8)), "samples_nothing": False, "max_tokens": 1},
            "late_query: goes with",
        ),
        ({"late_query": LateQuery()}, "late_query.token_ids: 0 bytes are no i32 column of tokens"),
        ({"late_query": LateQuery(token_ids=bytes(7))}, "late_query.token_ids: 7 bytes"),
        ({"late_query": LateQuery(token_ids=u32_bytes([1, 50]))}, "late_query.token_ids: 50 is not in the vocabulary"),
        ({"late_query": LateQuery(token_ids=bytes(4), params=bytes(2**24 + 1))}, "late_query.params: 16777217 bytes"),
        ({}, ""),
    ],
)
def test_contradictory_submissions_are_refused(fields: dict[str, object], text: str) -> None:
    values: dict[str, object] = {"num_sequences": 1, "samples_nothing": True, **fields}
    submission = scheduler_pb2.Submission(
        token_ids=bytes(8),
        num_prompt_tokens=2,
        root_hash=bytes(32),
        **values,  # type: ignore[arg-type]
    )
    failure = refusal(submission, 50)
    assert (failure is None) == (text == "")
    assert failure is None or text in failure.message
