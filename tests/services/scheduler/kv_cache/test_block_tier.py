"""Places in host memory: allocation and eviction."""

from __future__ import annotations

import random

from quire.services.scheduler.kv_cache.block_tier import BlockTier


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) for number in numbers]


def store(tier: BlockTier, *numbers: int) -> None:
    for name in names(*numbers):
        assert tier.begin_store(name) is not None
        tier.end_store(name)


def test_the_least_recently_used_block_is_evicted_first() -> None:
    tier = BlockTier(3)
    store(tier, 1, 2, 3)
    tier.begin_read(names(1))
    tier.end_read(names(1))
    store(tier, 4)
    assert [tier.holds(name) for name in names(1, 2, 3, 4)] == [True, False, True, True]


def test_the_tail_of_a_prefix_is_evicted_before_its_head() -> None:
    tier = BlockTier(3)
    store(tier, 1, 2, 3)
    tier.begin_read(names(1, 2, 3))
    tier.end_read(names(1, 2, 3))
    store(tier, 4, 5)
    assert [tier.holds(name) for name in names(1, 2, 3)] == [True, False, False]


def test_blocks_being_read_or_stored_are_not_evicted() -> None:
    tier = BlockTier(2)
    store(tier, 1)
    places = tier.begin_read(names(1))
    assert tier.begin_store(b"\x02") not in (None, *places)
    assert tier.begin_store(b"\x03") is None, "one is read, one is stored into"
    assert not tier.holds(b"\x02")
    tier.end_store(b"\x02", failed=True)
    assert tier.begin_store(b"\x03") is not None


def test_a_block_with_a_failed_read_is_dropped_after_its_last_reader() -> None:
    tier = BlockTier(2)
    store(tier, 1)
    tier.begin_read(names(1))
    tier.begin_read(names(1))
    tier.end_read(names(1), failed=True)
    assert tier.holds(b"\x01"), "it is still being read"
    tier.end_read(names(1), failed=True)
    assert not tier.holds_or_stores(b"\x01")
    assert tier.num_free == 2


def test_adopted_blocks_are_found() -> None:
    tier = BlockTier(4)
    tier.adopt([(2, b"a"), (0, b"b"), (2, b"c"), (3, b"a")])
    assert tier.begin_read([b"a", b"b"]) == [2, 0]
    assert (tier.num_held, tier.num_free) == (2, 2)


def test_every_place_is_free_storing_or_held() -> None:
    rng = random.Random(3)
    tier, storing, reading = BlockTier(8), [], []
    for _ in range(3000):
        name = bytes([rng.randrange(40)])
        if rng.random() < 0.4 and not tier.holds_or_stores(name) and tier.begin_store(name) is not None:
            storing.append(name)
        elif storing and rng.random() < 0.5:
            tier.end_store(storing.pop(rng.randrange(len(storing))), failed=rng.random() < 0.2)
        elif tier.holds(name) and rng.random() < 0.5:
            tier.begin_read([name])
            reading.append(name)
        elif reading:
            tier.end_read([reading.pop(0)], failed=rng.random() < 0.2)
        assert tier.num_free + tier.num_storing + tier.num_held == tier.num_places
        assert all(tier.holds(read) for read in reading)
    assert tier.num_evicted > 50
