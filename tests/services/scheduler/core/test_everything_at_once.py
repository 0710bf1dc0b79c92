"""Thousands of random operations on two cores whose sequences wait for grammars, queries, siblings and blocks, while
they are cancelled, preempted, migrated or expire, and while workers are lost, reset or drained at any time."""

from __future__ import annotations

from collections import Counter

import pytest

from quire.services.scheduler.core.limits import NO_TIERS, TierLimits
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from tests.services.scheduler.conftest import make_limits
from tests.services.scheduler.core.two_workers import TwoWorkers, operate

SIZES = [
    {"num_blocks": 60, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32},
    {"num_blocks": 70, "block_size": 4, "max_num_seqs": 6, "max_num_batched_tokens": 16},  # preempts all the time
    {"num_blocks": 60, "block_size": 8, "max_num_seqs": 12, "max_num_batched_tokens": 48, "watermark_blocks": 2},
]


def run(seed: int, tiers: TierLimits, drafts: int = 0, count: int = 600) -> TwoWorkers:
    limits = make_limits(
        **SIZES[seed % 3],
        max_model_len=120,
        max_steps_in_flight=1 + seed % 3,
        enable_prefix_caching=True,
        policy=find_policy(("fcfs", "priority", "fair")[seed // 3 % 3]),
        tiers=tiers,
        num_speculative_tokens=drafts,
        fixed_draft_length=drafts > 0,
        num_query_vectors=(14, 40)[seed % 2],  # 14: not all queries find a place at once
    )
    return operate(limits, seed, count)


@pytest.mark.parametrize("drafts", [0, 3])
@pytest.mark.parametrize("tiers", [NO_TIERS, TierLimits(16), TierLimits(16, 200, "arc")])
@pytest.mark.parametrize("seed", range(9))
def test_every_sequence_ends_once_with_the_text_of_the_oracle(seed: int, tiers: TierLimits, drafts: int) -> None:
    ends = Counter(client.end.reason for client in run(seed, tiers, drafts).clients.values() if client.end is not None)
    assert ends[Reason.STOP] + ends[Reason.LENGTH] > 10
    assert ends[Reason.CANCELLED] > 0


def test_the_operations_cover_every_prerequisite_and_every_end_reason() -> None:
    clusters = [run(seed, TierLimits(100, 400), count=1200) for seed in range(21, 25)]
    reasons = {client.end.reason for cluster in clusters for client in cluster.clients.values() if client.end}
    assert reasons >= {Reason.STOP, Reason.LENGTH, Reason.CANCELLED, Reason.DEADLINE, Reason.ERROR}
    counts = [attached for cluster in clusters for attached in cluster.counts]
    for name in ("query_hits", "fetches", "blocks_from_others", "disk_stored_blocks", "preemptions", "fetched_blocks"):
        assert sum(getattr(count, name) for count in counts) > 0, name
