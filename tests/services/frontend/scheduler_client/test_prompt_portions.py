"""Log-probabilities of prompts are delivered in portions, between which the event loop serves others."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import pytest

from quire.services.frontend.request.outcome import TokenLogprobs
from quire.services.frontend.scheduler_client.token_batch import ENTRIES_IN_A_TURN, DeliveryOutcome, prompt_portions
from quire.shared.columns import f32_bytes, i32_bytes, u32_bytes
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb


@dataclass
class Live:
    """What a live sequence and its sink have received."""

    received: list[TokenLogprobs] = field(default_factory=list)
    num_prompt_logprobs: int = 0
    largest: int = 0  # candidates in one delivery

    @property
    def sink(self) -> Live:
        return self

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        self.largest = max(self.largest, sum(1 + len(entry.top) for entry in logprobs))
        self.received += logprobs


def batch_of(positions: list[int], candidates: list[int]) -> pb.PromptLogprobBatch:
    """Returns a batch of sequences 0, 1, ... with these numbers of positions; token ids count up."""
    total = sum(candidates)
    return pb.PromptLogprobBatch(
        sequence_ids=u32_bytes(range(len(positions))),
        position_counts=u32_bytes(positions),
        entry_counts=u32_bytes(candidates),
        token_ids=i32_bytes(range(total)),
        logprobs=f32_bytes(-np.arange(total, dtype=np.float32)),
        ranks=u32_bytes(range(len(candidates))),
    )


def entries(candidates: list[int]) -> list[TokenLogprobs]:
    begins = [0, *accumulate(candidates)]
    return [
        TokenLogprobs(begin, -float(begin), rank, [(other, -float(other)) for other in range(begin + 1, begin + count)])
        for rank, (begin, count) in enumerate(zip(begins, candidates, strict=False))
    ]


@pytest.mark.parametrize(
    ("positions", "width"),
    [([4000] * 8, 21), ([1], 1), ([3, 0, 2], 2), ([1, 1, 1], 20_000), ([70_000], 1), ([100] * 500, 3)],
)
def test_no_portion_is_larger_than_a_turn_and_nothing_is_lost(positions: list[int], width: int) -> None:
    candidates = [width] * sum(positions)
    live: dict[int, Any] = {number: Live() for number in range(len(positions))}
    delivered = [0]
    for _ in prompt_portions(batch_of(positions, candidates), live, DeliveryOutcome()):
        delivered.append(sum(one.num_prompt_logprobs for one in live.values()) * width)
    delivered.append(sum(candidates))
    steps = [later - before for before, later in pairwise(delivered)]
    assert max(steps) < 2 * max(ENTRIES_IN_A_TURN, width) + width
    expected = entries(candidates)
    assert [entry for one in live.values() for entry in one.received] == expected
    assert [one.num_prompt_logprobs for one in live.values()] == positions
    assert max(one.largest for one in live.values()) < ENTRIES_IN_A_TURN + width


def test_positions_with_different_numbers_of_candidates() -> None:
    candidates = [1 + number * 37 % 50 for number in range(3000)]
    live: dict[int, Any] = {0: Live(), 1: Live()}
    for _ in prompt_portions(batch_of([1000, 2000], candidates), live, DeliveryOutcome()):
        pass
    expected = entries(candidates)
    assert live[0].received == expected[:1000]
    assert live[1].received == expected[1000:]


def test_a_sequence_that_is_cancelled_between_portions_gets_no_more() -> None:
    live: dict[int, Any] = {0: Live(), 1: Live()}
    first, second = live[0], live[1]
    portions = prompt_portions(batch_of([2000, 2000], [10] * 4000), live, DeliveryOutcome())
    next(portions)
    del live[0]
    for _ in portions:
        pass
    assert 0 < len(first.received) < 2000
    assert len(second.received) == 2000


@pytest.mark.parametrize("change", ["token_ids", "logprobs", "ranks", "position_counts"])
def test_columns_of_other_lengths_are_refused(change: str) -> None:
    batch = batch_of([3], [2, 2, 2])
    setattr(batch, change, getattr(batch, change) + bytes(3) + b"\x01")
    with pytest.raises(ValueError):  # noqa: PT011
        list(prompt_portions(batch, {}, DeliveryOutcome()))
