"""Conversion of frontends' submissions to sequences."""

from __future__ import annotations

from typing import Any

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.frontends.submissions import SequenceFactory
from quire.shared.columns import i32_bytes
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from tests.services.scheduler.conftest import make_limits


def submitted(now: float, **fields: Any) -> list[float]:
    """Returns the queue time reported for each sequence, if it is planned a quarter of a second after its arrival."""
    prompt = {"token_ids": i32_bytes([1, 2, 3]), "num_prompt_tokens": 3, "max_tokens": 2}
    submission = pb.Submission(**{"request_id": "a", "num_sequences": 1, **prompt, **fields})
    core = Core(make_limits())
    for sequence in SequenceFactory().sequences(submission, 0, now):
        core.add(sequence)
    core.schedule(now + 0.25)
    return [started.queued_s for started in core.take_events().started]


def test_tokenization_time_is_not_queue_time() -> None:
    assert submitted(now=100.0, age_ms=5000) == [0.25]
    search = sampling_pb2.BeamSearch(width=2)
    assert submitted(now=100.0, age_ms=5000, num_sequences=2, beam_search=search) == [0.25, 0.25]
