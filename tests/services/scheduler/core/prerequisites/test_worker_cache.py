"""WorkerCache: references, budgets, and eviction of entries without users."""

from __future__ import annotations

import random

import pytest

from quire.services.scheduler.core.prerequisites.blocked import BlockedSequences
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from tests.services.scheduler.conftest import make_sequence


class CacheHarness:
    """A cache, and the calls for the worker in order."""

    def __init__(self, limits: CacheLimits) -> None:
        self.told: list[tuple[str, bytes]] = []
        self.placed: dict[bytes, bool] = {}
        self.blocked = BlockedSequences()
        self.cache = WorkerCache(limits, self.blocked, prepare=self._prepare, evict=self._evict)

    def _prepare(self, entry: CacheEntry) -> None:
        self.told.append(("prepare", entry.entry_id))
        self.placed[entry.entry_id] = True

    def _evict(self, entry_id: bytes) -> None:
        self.told.append(("evict", entry_id))

    def check(self) -> None:
        self.cache.check_invariant()
        self.blocked.check_invariant()


def test_the_least_recently_used_entry_is_evicted_when_too_many_are_idle() -> None:
    rig = CacheHarness(CacheLimits(max_idle=1))
    first, second = (make_sequence(key, [key]) for key in (1, 2))
    for name, sequence in ((b"a", first), (b"b", second)):
        assert not rig.cache.join(name, 1, sequence)
        assert rig.cache.ready(name) == [sequence]
        rig.cache.leave(name, sequence)
    assert rig.told == [("prepare", b"a"), ("prepare", b"b"), ("evict", b"a")]


def test_an_entry_in_use_is_never_evicted() -> None:
    rig = CacheHarness(CacheLimits(max_idle=9, capacity=10))
    first, second = (make_sequence(key, [key]) for key in (1, 2))
    rig.cache.join(b"a", 8, first)
    rig.cache.join(b"b", 3, second)
    rig.cache.ready(b"a")
    assert rig.told == [("prepare", b"a")]
    rig.cache.leave(b"a", first)
    assert rig.told[1:] == [("evict", b"a"), ("prepare", b"b")]


def test_a_failure_returns_all_users_and_places_the_next_entry() -> None:
    rig = CacheHarness(CacheLimits(max_idle=9, capacity=10))
    sequences = [make_sequence(key, [key]) for key in range(3)]
    rig.cache.join(b"a", 8, sequences[0])
    rig.cache.join(b"a", 8, sequences[1])
    rig.cache.join(b"b", 3, sequences[2])
    assert rig.cache.remove(b"a") == sequences[:2]
    assert rig.told == [("prepare", b"a"), ("prepare", b"b")]


@pytest.mark.parametrize("seed", range(20))
def test_sizes_places_and_references_add_up_through_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    rig = CacheHarness(CacheLimits(max_idle=3, max_idle_size=12, capacity=rng.choice([None, 15, 30])))
    users: dict[int, bytes] = {}
    sequences = [make_sequence(key, [key]) for key in range(40)]
    for _ in range(400):
        sequence, name = rng.choice(sequences), bytes([rng.randrange(8)])
        if sequence.key in users:
            name = users.pop(sequence.key)
            unused = rig.cache.leave(name, sequence)
            if unused is not None and rng.random() < 0.5:
                rig.cache.remove(name)
        elif rng.random() < 0.7:
            users[sequence.key] = name
            rig.placed[name] = name in rig.cache and rig.placed[name]
            is_ready = rig.cache.join(name, 1 + name[0], sequence)
            assert is_ready == (sequence not in rig.blocked.on(name))
        name = bytes([rng.randrange(8)])
        if name in rig.cache and rig.placed[name] and rng.random() < 0.5:
            if rng.random() < 0.8:
                rig.cache.ready(name)
            else:
                for failed in rig.cache.remove(name):
                    del users[failed.key]
        rig.check()
        assert rig.cache.num_users == len(users)
