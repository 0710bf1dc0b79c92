"""Grouping of a step's events in messages to a frontend."""

from __future__ import annotations

import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.frontends.batches import OwnerBatches
from quire.services.scheduler.replicas.codec import decode_result
from quire.shared.columns import i32_bytes, u32
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.scheduler.conftest import make_limits, make_sequence

EOS = 2


@pytest.mark.parametrize("preempted", [1, 2])
def test_a_sequence_ends_in_the_message_with_its_last_token(preempted: int) -> None:
    """The token of a preempted sequence comes in columns of its own, after all others."""
    core = Core(make_limits())
    for key in (1, 2):
        core.add(make_sequence(key, [5, 6, 7], eos_token_ids=frozenset([EOS])))
    assert core.schedule(0) is not None
    core.preempt(preempted - 1)
    ended = 3 - preempted
    tokens = [EOS if key == ended else 9 for key in (1, 2)]
    core.apply(decode_result(pb.StepResult(step_id=1, token_ids=i32_bytes(tokens))), 0)
    batches = OwnerBatches()
    batches.add(core.take_events())
    told = {key: message.tokens for message in batches.by_owner[0] for key in u32(message.tokens.sequence_ids).tolist()}
    assert set(told) == {1, 2}
    assert [finished.sequence_id for finished in told[ended].finished] == [ended]
    assert not told[preempted].finished
