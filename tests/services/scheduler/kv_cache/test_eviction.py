"""Eviction policies: sequences of operations, and the blocks that remain."""

from __future__ import annotations

import random

import pytest

from quire.services.scheduler.kv_cache.block_frequency import BlockFrequency
from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.services.scheduler.kv_cache.eviction import ARC, LRU, POLICIES
from quire.services.scheduler.kv_cache.kv_priority import KVPriority


def name(number: int) -> bytes:
    return bytes([number])


def ask(tier: BlockTier, number: int) -> bool:
    """Reads or stores a block; returns whether it was stored before."""
    if tier.holds(name(number)):
        tier.touch([name(number)])
        return True
    assert tier.begin_store(name(number)) is not None
    tier.end_store(name(number))
    return False


def held(tier: BlockTier) -> list[int]:
    return sorted(block_hash[0] for block_hash in tier.held())


@pytest.mark.parametrize(
    ("policy", "asked", "left"),
    [
        ("lru", [1, 2, 3, 4, 5], [2, 3, 4, 5]),
        ("lru", [1, 2, 3, 4, 1, 5], [1, 3, 4, 5]),
        ("lru", [1, 1, 2, 2, 3, 4, 5, 6, 7, 8], [5, 6, 7, 8]),
        ("arc", [1, 2, 3, 4, 5], [2, 3, 4, 5]),
        ("arc", [1, 1, 2, 2, 3, 4, 5, 6, 7, 8], [1, 2, 7, 8]),  # what came once makes room for what came once
        (
            "arc",
            [1, 1, 2, 2, 3, 4, 5, 3],
            [1, 2, 3, 5],
        ),  # 3 was lost too early: it comes back as one of those used again
        ("arc", [1, 2, 3, 4, 1, 2, 3, 4, 5, 6], [2, 3, 4, 6]),
    ],
)
def test_the_policies_keep_the_expected_blocks(policy: str, asked: list[int], left: list[int]) -> None:
    tier = BlockTier(4, POLICIES[policy])
    for number in asked:
        ask(tier, number)
    assert held(tier) == left


def test_a_miss_on_an_evicted_block_moves_arcs_target() -> None:
    made: list[ARC] = []

    def make(capacity: int) -> ARC:
        made.append(ARC(capacity))
        return made[-1]

    tier = BlockTier(4, make)
    (_, arc, _) = made  # of low, normal and high priority
    for number in (1, 1, 2, 2, 3, 4, 5, 6):
        ask(tier, number)
    assert arc.target == 0
    ask(tier, 3)  # lost from those that came once: their list was too short
    assert arc.target == 1
    ask(tier, 4)
    assert arc.target == 2
    for number in (7, 8, 9):  # of those that came again some have to go now
        ask(tier, number)
    before = arc.target
    ask(tier, 1)
    assert arc.target < before


def test_a_failed_read_leaves_no_trace_in_either_list() -> None:
    for policy in POLICIES:
        tier = BlockTier(2, POLICIES[policy])
        ask(tier, 1)
        ask(tier, 1)
        tier.begin_read([name(1)])
        tier.end_read([name(1)], failed=True)
        for number in (2, 3, 4):
            ask(tier, number)
        assert held(tier) == [3, 4]


def test_arc_keeps_reused_blocks_through_a_flood() -> None:
    hits = {}
    for policy in ("lru", "arc"):
        rng, tier = random.Random(1), BlockTier(32, POLICIES[policy])
        hits[policy] = 0
        for round_ in range(4000):
            flood = 64 + round_ % 190
            hits[policy] += ask(tier, rng.randrange(24)) if rng.random() < 0.4 else ask(tier, flood) and False
    assert hits["arc"] > 1.2 * hits["lru"]


@pytest.mark.parametrize("policy", [LRU, ARC])
def test_a_policy_tracks_the_blocks_of_its_tier(policy: type[LRU | ARC]) -> None:
    rng, tier = random.Random(5), BlockTier(8, policy)
    reading: list[bytes] = []
    for _ in range(4000):
        number = rng.randrange(40)
        if tier.holds(name(number)) and rng.random() < 0.3:
            tier.begin_read([name(number)])
            reading.append(name(number))
        elif reading and rng.random() < 0.6:
            tier.end_read([reading.pop(0)], failed=rng.random() < 0.2)
        elif not tier.holds_or_stores(name(number)) and tier.begin_store(name(number)) is not None:
            tier.end_store(name(number), failed=rng.random() < 0.1)
        elif tier.holds(name(number)):
            tier.touch([name(number)])
        if rng.random() < 0.2:
            tier.set_priority([name(rng.randrange(40)) for _ in range(3)], rng.choice([*KVPriority]))
        assert tier.num_free + tier.num_storing + tier.num_held == 8
        assert all(map(tier.holds, reading))
    for block_hash in reading:
        tier.end_read([block_hash])
    assert tier.clear() > 0
    assert ask(tier, 1) is False


def test_occurrences_are_counted_and_the_oldest_dropped() -> None:
    seen = BlockFrequency(2, most=3)
    assert seen.count_prompt([name(1), name(2)]) == []
    assert seen.count_prompt([name(1)]) == [name(1)]
    assert seen.count_prompt([name(1)]) == [], "only once"
    assert seen.has_reached_threshold(name(1))
    assert not seen.has_reached_threshold(name(2))
    seen.count_prompt([name(3), name(4)])
    assert seen.count_prompt([name(2)]) == [], "it was forgotten"
