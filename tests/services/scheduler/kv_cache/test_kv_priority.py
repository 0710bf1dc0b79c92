"""Retention priorities of prompts, and the order in which a tier evicts their blocks."""

from __future__ import annotations

import pytest

from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.services.scheduler.kv_cache.eviction import POLICIES
from quire.services.scheduler.kv_cache.kv_priority import KVPriority

LOW, NORMAL, HIGH = KVPriority


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def prompt(tier: BlockTier, *numbers: int, priority: KVPriority = NORMAL) -> None:
    """Admits a prompt and stores its blocks as far as there is room."""
    tier.set_priority(names(*numbers), priority)
    tier.touch(names(*numbers))
    for name in names(*numbers):
        if not tier.holds(name) and tier.begin_store(name) is not None:
            tier.end_store(name)


def held(tier: BlockTier) -> list[int]:
    return sorted(name[0] for name in tier.held())


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_are_evicted_by_priority(policy: str) -> None:
    tier = BlockTier(6, POLICIES[policy])
    prompt(tier, 1, 2, priority=HIGH)
    prompt(tier, 3, 4)
    prompt(tier, 5, 6, priority=LOW)
    prompt(tier, 7, 8)
    assert held(tier) == [1, 2, 3, 4, 7, 8]
    prompt(tier, 9, 10, 11, 12, 13, 14)
    assert held(tier) == [1, 2, 11, 12, 13, 14]


def test_an_evicted_high_priority_block_is_high_again() -> None:
    tier = BlockTier(4)
    tier.set_priority(names(1), HIGH)  # before it is held
    prompt(tier, 1)
    prompt(tier, 2, 3, 4, 5)
    assert held(tier) == [1, 3, 4, 5]


def test_a_stored_block_can_become_high_and_stays_high() -> None:
    tier = BlockTier(4)
    prompt(tier, 1, 2, 3, 4)
    tier.set_priority(names(2), HIGH)
    tier.set_priority(names(2), NORMAL)
    tier.set_priority(names(2), LOW)
    prompt(tier, 5, 6, 7, 8)
    assert held(tier) == [2, 6, 7, 8]


def test_low_becomes_normal_when_another_prompt_needs_it() -> None:
    tier = BlockTier(4)
    prompt(tier, 1, 2, priority=LOW)
    prompt(tier, 3, 4, 1)
    prompt(tier, 5)
    assert held(tier) == [1, 3, 4, 5]
    prompt(tier, 1, priority=LOW)  # stored with normal priority already: a low request does not lower it
    prompt(tier, 6, 7)
    assert held(tier) == [1, 5, 6, 7]


def test_high_priority_covers_half_of_the_places() -> None:
    tier = BlockTier(4)
    prompt(tier, 1, 2, 3, 4, priority=HIGH)
    assert [tier.is_high(name) for name in names(1, 2, 3, 4)] == [False, False, True, True]
    prompt(tier, 5, 6)
    assert held(tier) == [3, 4, 5, 6]
    prompt(tier, 7, 8, priority=HIGH)
    prompt(tier, 9, 10)
    assert held(tier) == [7, 8, 9, 10]


def test_a_reset_clears_priorities() -> None:
    tier = BlockTier(4)
    prompt(tier, 1, 2, priority=HIGH)
    tier.clear()
    prompt(tier, 1, 2, 3, 4, 5, 6)
    assert held(tier) == [3, 4, 5, 6]
