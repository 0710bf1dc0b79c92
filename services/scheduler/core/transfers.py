"""Blocks that move between a worker's device and its host memory, beside the steps.

What steps fill is copied to host memory as soon as it is on record. A sequence whose prompt goes on there, where the
device's cache ends, waits, blocked, until those blocks are back; it then finds them as if they had never left. A
transfer holds its blocks until the worker has told that it is done: nobody takes or writes them meanwhile.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Sequence as Blocks
from dataclasses import dataclass, field

from services.scheduler.core.counts import Counts
from services.scheduler.core.sequence import Sequence
from services.scheduler.kv_cache.host_tier import HostTier
from services.scheduler.kv_cache.kv_cache_manager import KVCacheManager

LEAST_BLOCKS = 2  # that are worth the wait
MOST_FETCHES = 2  # of a sequence: whoever loses its blocks again before it comes in computes them
STORING_SHARE = 2  # at most one of so many blocks is held by transfers to host memory


@dataclass(frozen=True, slots=True)
class TransferOrder:
    """What the worker is to do, behind the steps that were ordered before."""

    transfer_id: int
    to_host: bool  # else to the device
    blocks: list[int]
    places: list[int]  # in host memory, same order
    hashes: list[bytes]  # what they hold


@dataclass(frozen=True, slots=True)
class _UnderWay:
    order: TransferOrder
    waiting: dict[int, Sequence] = field(default_factory=dict)  # by key: blocked until it is done


class Transfers:
    """Decides what moves, and knows who waits for it."""

    def __init__(self, kv: KVCacheManager, num_places: int, counts: Counts) -> None:
        assert kv.groups.plain, "blocks of several groups stay on the device"
        self.tier = HostTier(num_places)
        self._kv = kv
        self._counts = counts
        self._ids = itertools.count(1)
        self._orders: list[TransferOrder] = []
        self._under_way: dict[int, _UnderWay] = {}
        self._coming: dict[bytes, int] = {}  # what is on its way to the device, and by which transfer
        self._most_storing = max(1, kv.pool.num_blocks // STORING_SHARE)
        self._filled: deque[tuple[int, bytes]] = deque(maxlen=kv.pool.num_blocks)  # yet to be stored, and their hashes
        kv.watch_filled()

    # What is asked.

    @property
    def num_blocked(self) -> int:
        return sum(len(transfer.waiting) for transfer in self._under_way.values())

    def blocked(self) -> list[Sequence]:
        return [sequence for transfer in self._under_way.values() for sequence in transfer.waiting.values()]

    @property
    def num_under_way(self) -> int:
        return len(self._under_way)

    def awaits(self, transfer_id: int) -> bool:
        """Whether the worker owes word of this transfer."""
        return transfer_id in self._under_way

    def num_behind(self, hashes: Blocks[bytes], start: int) -> int:
        """How many blocks of a chain, from the one at `start` on, could be brought back."""
        end = start
        while end < len(hashes) and self.tier.holds(hashes[end]):
            end += 1
        return end - start

    def take_orders(self) -> list[TransferOrder]:
        """In the order in which the worker must get them, behind the plans that are out."""
        orders, self._orders = self._orders, []
        return orders

    # What is ordered.

    def store_filled(self) -> None:
        """Copies to host memory what the steps that are ordered fill, in turn, as far as there is room for it; what the
        device has lost meanwhile is passed over."""
        self._filled += self._kv.take_filled()
        found: list[tuple[int, int, bytes]] = []
        room = self._most_storing - self.tier.num_storing
        while self._filled and len(found) < room:
            block, block_hash = self._filled[0]
            if not self.tier.knows(block_hash) and self._kv.pool.find(block_hash) == block:
                place = self.tier.begin_store(block_hash)
                if place is None:
                    break
                found.append((block, place, block_hash))
            self._filled.popleft()
        if found:
            blocks, places, hashes = map(list, zip(*found, strict=True))
            order = self._order(TransferOrder(next(self._ids), True, blocks, places, hashes))
            self._kv.hold(order.transfer_id, blocks)

    def fetch(self, sequence: Sequence, found: Blocks[int], most: int) -> bool:
        """Brings back what comes behind the blocks `found` on the device, at most `most` blocks. Whether it has to wait
        for that."""
        if sequence.num_fetches >= MOST_FETCHES:
            return False
        hashes, start = sequence.block_hashes, len(found)
        coming = self._coming.get(hashes[start]) if start < len(hashes) else None
        if coming is None:
            count = min(self.num_behind(hashes, start), most)
            if count < LEAST_BLOCKS:
                return False
            coming = self._bring(found, hashes[start : start + count])
        sequence.num_fetches += 1
        self._under_way[coming].waiting[sequence.key] = sequence
        return True

    def _bring(self, found: Blocks[int], hashes: list[bytes]) -> int:
        """`found` must still be there when they come."""
        transfer_id = next(self._ids)
        self._kv.hold(transfer_id, found)
        blocks = self._kv.take(transfer_id, len(hashes))
        self._order(TransferOrder(transfer_id, False, blocks, self.tier.begin_read(hashes), hashes))
        self._coming.update(dict.fromkeys(hashes, transfer_id))
        self._counts.fetched_blocks += len(hashes)
        return transfer_id

    def _order(self, order: TransferOrder) -> TransferOrder:
        self._orders.append(order)
        self._under_way[order.transfer_id] = _UnderWay(order)
        return order

    # What came of it.

    def done(self, transfer_id: int, *, failed: bool) -> list[Sequence]:
        """The worker is done with it: those who waited, in the order in which they came."""
        transfer = self._under_way.pop(transfer_id)
        order = transfer.order
        if order.to_host:
            for block_hash in order.hashes:
                self.tier.end_store(block_hash, failed=failed)
            self._counts.stored_blocks += 0 if failed else len(order.hashes)
        else:
            self.tier.end_read(order.hashes, failed=failed)
            for block, block_hash in zip(order.blocks, order.hashes, strict=True):
                del self._coming[block_hash]
                if not failed:
                    self._kv.pool.name(block, block_hash)
        self._counts.failed_transfers += failed
        self._kv.let_go(transfer_id)
        if self._filled:
            self.store_filled()
        return list(transfer.waiting.values())

    def leave(self, sequence: Sequence) -> None:
        """It waits no longer, if it did."""
        for transfer in self._under_way.values():
            transfer.waiting.pop(sequence.key, None)

    def forget(self) -> int:
        """Forgets what host memory holds; only while nothing moves. Returns how many blocks that were."""
        self._kv.take_filled()
        self._filled.clear()
        return self.tier.forget_all()
