"""Known prefix-cache scenarios with their numbers (block size 16 unless stated; num_blocks counts the null block)."""

from __future__ import annotations

import pytest

from quire.services.scheduler.kv_cache.block_pool import BlockPool
from quire.services.scheduler.kv_cache.free_list import FreeList
from quire.services.scheduler.kv_cache.groups import KVGroups
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from quire.shared import columns
from quire.shared.kv import block_hash
from quire.shared.kv.kv_specs import ONE_FULL

COMMON = list(range(48))


class Sequences:
    """Sequences as the core treats them: match, admit, grow, record hashes."""

    def __init__(self, num_blocks: int, block_size: int = 16, caching: bool = True) -> None:
        self.kv = KVCacheManager(num_blocks, KVGroups(ONE_FULL, block_size, 8192), num_slots=8, enable_caching=caching)
        self.size = block_size
        self.hashes: dict[int, list[bytes]] = {}

    def admit(self, slot: int, tokens: list[int], salt: str = "") -> tuple[list[int], list[int] | None]:
        """Returns (hit blocks, new blocks)."""
        hashes = block_hash.chain(block_hash.root_hash(salt=salt), columns.i32_bytes(tokens), self.size)
        match = self.kv.match(hashes)
        hits = match.blocks
        if self.kv.blocks_for(len(tokens)) - len(hits) > self.kv.pool.num_free - match.num_free:
            return hits, None
        self.kv.admit(slot, hits)
        new = self.kv.grow(slot, len(tokens))
        if self.kv.enable_caching:
            self.kv.record_hashes(slot, hashes[len(hits) :])
        self.hashes[slot] = hashes
        return hits, new

    def free(self, *slots: int) -> None:
        for slot in slots:
            self.kv.release(slot, fence=None)


def test_p1_hits_share_blocks_and_the_free_order_is_lru_with_tails_first() -> None:
    cache = Sequences(11)
    assert cache.admit(0, COMMON + [100] * 7) == ([], [1, 2, 3, 4])
    assert [cache.kv.pool.hash_of(b) is not None for b in (1, 2, 3, 4)] == [True, True, True, False]
    assert cache.admit(1, COMMON + [101] * 5) == ([1, 2, 3], [5])
    assert cache.kv.pool.num_free == 5
    cache.free(0, 1)
    assert cache.kv.pool.free_order == [5, 4, 6, 7, 8, 9, 10, 3, 2, 1]
    assert cache.admit(2, COMMON + [102] * 6) == ([1, 2, 3], [5])
    cache.free(2)
    assert cache.admit(3, list(range(1000, 1160))) == ([], [5, 4, 6, 7, 8, 9, 10, 3, 2, 1])


def test_p2_decoding_allocates_a_block_only_when_the_last_is_full() -> None:
    cache = Sequences(11)
    cache.admit(0, list(range(55)))
    assert cache.kv.grow(0, 59) == []
    assert cache.kv.grow(0, 74) == [5]


def test_p4_reallocating_the_only_block_evicts_its_content() -> None:
    cache = Sequences(2)
    cache.admit(0, COMMON[:16])
    cache.free(0)
    held = cache.hashes[0]
    assert cache.kv.match(held).blocks == [1]
    assert cache.admit(1, list(range(500, 510))) == ([], [1])
    assert cache.kv.match(held).blocks == []
    assert cache.kv.pool.hash_of(1) is None


def test_p5_a_hit_block_is_not_the_one_evicted_for_its_own_sequence() -> None:
    cache = Sequences(3)
    cache.admit(0, COMMON[:32])
    cache.free(0)
    assert cache.admit(1, COMMON[:16] + [7] * 8) == ([1], [2])


def test_p6_without_caching_blocks_are_counted_and_refused() -> None:
    cache = Sequences(5, block_size=4, caching=False)
    assert cache.admit(0, list(range(10))) == ([], [1, 2, 3])
    assert cache.kv.grow(0, 16) == [4]
    assert cache.admit(1, list(range(4)))[1] is None
    assert cache.kv.grow(0, 17) is None
    assert list(cache.kv.table(0)) == [1, 2, 3, 4], "a refused growth changes nothing"


@pytest.mark.parametrize(("salt", "hits"), [("a", [1, 2, 3]), ("b", []), ("", [])])
def test_p8_blocks_are_shared_only_under_the_same_salt(salt: str, hits: list[int]) -> None:
    cache = Sequences(11)
    cache.admit(0, COMMON, salt="a")
    assert cache.admit(1, COMMON, salt=salt)[0] == hits


def test_p10_a_reset_requires_all_blocks_free() -> None:
    cache = Sequences(11)
    cache.admit(0, COMMON)
    assert not cache.kv.idle
    with pytest.raises(AssertionError):
        cache.kv.reset()
    cache.free(0)
    assert cache.kv.use.cached == 3
    assert cache.kv.reset() == 3
    assert cache.kv.match(cache.hashes[0]).blocks == []
    assert cache.kv.use.cached == 0


def test_p19_the_free_list_keeps_order_through_every_operation() -> None:
    free = FreeList(8, range(1, 6))
    free.remove(3)
    free.append(3)
    free.prepend(7)
    assert list(free) == [7, 1, 2, 4, 5, 3]
    assert free.popleft() == 7
    assert free.popleft_n(2) == [1, 2]
    assert list(free) == [4, 5, 3]
    assert len(free) == 3
    with pytest.raises(IndexError, match="No free blocks available"):
        free.popleft_n(4)
    free.popleft_n(3)
    with pytest.raises(IndexError, match="No free blocks available"):
        free.popleft()
    free.extend([2, 6])
    free.extend([])
    free.extend([5])
    assert list(free) == [2, 6, 5]
    free.remove(6)
    assert free.popleft_n(2) == [2, 5]
    assert len(free) == 0


def test_a_fence_keeps_blocks_owned_until_the_step_has_returned() -> None:
    cache = Sequences(11)
    cache.admit(0, COMMON)
    cache.kv.release(0, fence=7)
    assert cache.kv.use.used == 3
    cache.kv.pass_fence(6)
    assert cache.kv.use.used == 3
    cache.kv.pass_fence(7)
    assert cache.kv.use.used == 0
    assert cache.kv.match(cache.hashes[0]).blocks == [1, 2, 3]


def test_of_equal_blocks_one_is_found_and_the_twin_is_allocated_first() -> None:
    cache = Sequences(11)
    cache.admit(0, COMMON[:16])
    cache.kv.admit(1, [])  # computes the same without having looked
    cache.kv.grow(1, 16)
    cache.kv.record_hashes(1, cache.hashes[0])
    cache.free(0, 1)
    assert cache.kv.match(cache.hashes[0]).blocks == [1]
    assert cache.kv.pool.free_order[0] == 2


def test_adopted_blocks_are_hit_and_evicted_in_the_order_of_adoption() -> None:
    pool = BlockPool(6)
    pool.adopt(4, b"a")
    pool.adopt(2, b"b")
    pool.adopt(3, b"a")  # a second copy is no change
    assert (pool.find(b"a"), pool.find(b"b")) == (4, 2)
    assert pool.free_order == [1, 3, 5, 4, 2]
    assert pool.use.cached == 2
    assert pool.allocate(4) == [1, 3, 5, 4]
    assert pool.find(b"a") is None


def test_a_twin_is_found_when_its_block_is_evicted() -> None:
    cache = Sequences(9)
    hashes = block_hash.chain(block_hash.root_hash(), columns.i32_bytes(COMMON), 16)
    for slot in (0, 1):  # both compute the same at the same time
        cache.kv.admit(slot, [])
        cache.kv.grow(slot, 48)
    cache.kv.record_hashes(0, hashes)
    cache.kv.record_hashes(1, hashes)
    assert cache.kv.match(hashes).blocks == [1, 2, 3]
    cache.free(0)
    cache.kv.admit(2, [])
    assert cache.kv.grow(2, 16 * 5) is not None  # all that is free
    assert cache.kv.match(hashes).blocks == [4, 5, 6]
    cache.free(2)
    cache.free(1)
    assert cache.kv.use.cached == 3
    assert cache.kv.match(hashes).blocks == [4, 5, 6]


def test_unowned_twins_are_not_kept() -> None:
    cache = Sequences(9)
    hashes = block_hash.chain(block_hash.root_hash(), columns.i32_bytes(COMMON), 16)
    for slot in (0, 1, 2):
        cache.kv.admit(slot, [])
        cache.kv.grow(slot, 32)
        cache.kv.record_hashes(slot, hashes[:2])
    cache.free(1, 0, 2)
    assert (cache.kv.use.cached, cache.kv.use.free) == (2, 6)
    cache.kv.admit(3, [])
    cache.kv.grow(3, 16 * 8)
    assert cache.kv.match(hashes).blocks == []
    assert cache.kv.use.cached == 0


class RecordingObserver:
    """Tracks the hashes that it was notified of."""

    def __init__(self) -> None:
        self.held: set[bytes] = set()

    def store(self, block_hash: bytes) -> None:
        assert block_hash not in self.held
        self.held.add(block_hash)

    def remove(self, block_hash: bytes) -> None:
        self.held.remove(block_hash)


def test_an_observer_is_notified_when_the_last_equal_block_is_evicted() -> None:
    told = RecordingObserver()
    pool = BlockPool(5, told)
    (one, other) = pool.allocate(2)
    pool.record_hash(one, b"hash")
    pool.record_hash(other, b"hash")
    pool.release([one])
    pool.allocate(3)
    assert told.held == {b"hash"}
    pool.release([other])
    pool.allocate(1)
    assert told.held == set()
