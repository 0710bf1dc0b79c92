"""Blocks that move between a worker's host memory and its disk.

What has come to host memory is written to disk, a few blocks at a time: whatever host memory loses is there. What it
has lost is read back into it when a prompt wants that, and goes on to the device from there. How long that may take,
and whether a block on disk is what it should be, is the worker's to judge: what it cannot bring is computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Blocks

from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.transfers.orders import DiskOrder
from quire.services.scheduler.kv_cache.block_tier import BlockTier

MOST_STORING = 64  # blocks at a time: beside a prompt that comes back a disk has other things to do
LOADING_SHARE = 2  # at most one of so many places of host memory waits for the disk
ORDER_BLOCKS = 16  # of an order to write


class DiskTransfers:
    """Decides what goes to disk and what comes back."""

    def __init__(self, host: BlockTier, tier: BlockTier, counts: CoreCounts, next_id: Callable[[], int]) -> None:
        self.tier = tier
        self._host = host
        self._counts = counts
        self._next_id = next_id
        self._orders: list[DiskOrder] = []
        self._in_flight: dict[int, DiskOrder] = {}
        self._incoming: dict[bytes, int] = {}  # what is on its way to host memory, and by which transfer
        self._offered: deque[bytes] = deque(maxlen=host.num_places)
        self._most_storing = max(1, min(MOST_STORING, host.num_places // 4))
        self._most_loading = max(1, host.num_places // LOADING_SHARE)

    # What is asked.

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def awaits(self, transfer_id: int) -> bool:
        return transfer_id in self._in_flight

    def take_orders(self) -> list[DiskOrder]:
        orders, self._orders = self._orders, []
        return orders

    # What is ordered.

    def offer(self, hashes: Iterable[bytes]) -> None:
        """Offers blocks in host memory to the disk. Where many wait to be written, the first ones are passed over."""
        self._offered += hashes
        self.store_offered()

    def store_offered(self) -> None:
        """Writes what was offered, in turn, as far as there is room for it; what host memory has lost meanwhile is
        passed over."""
        found: list[tuple[int, bytes]] = []
        while self._offered and self.tier.num_storing < self._most_storing:
            block_hash = self._offered[0]
            if self._host.holds(block_hash) and not self.tier.holds_or_stores(block_hash):
                place = self.tier.begin_store(block_hash)
                if place is None:
                    break
                found.append((place, block_hash))
            self._offered.popleft()
        for start in range(0, len(found), ORDER_BLOCKS):
            disk_places, hashes = map(list, zip(*found[start : start + ORDER_BLOCKS], strict=True))
            self._order(DiskOrder(self._next_id(), True, self._host.pin(hashes), disk_places, hashes))

    def order_read(self, hashes: Blocks[bytes]) -> int | None:
        """The transfer after which as many of a chain are in host memory as there is room for; None if none of those
        that are not there can come. Each of them is in host memory, on its way there, or on disk."""
        coming = next((self._incoming[block_hash] for block_hash in hashes if block_hash in self._incoming), None)
        if coming is not None:
            return coming
        there = [block_hash for block_hash in hashes if self._host.holds(block_hash)]
        self._host.pin(there)  # else what comes takes their places
        found: list[tuple[int, bytes]] = []
        room = self._most_loading - len(self._incoming)
        for block_hash in hashes:
            if self._host.holds_or_stores(block_hash):
                continue
            place = self._host.begin_store(block_hash) if len(found) < room else None
            if place is None:
                break
            found.append((place, block_hash))
        self._host.end_read(there)
        if not found:
            return None
        places, wanted = map(list, zip(*found, strict=True))
        order = DiskOrder(self._next_id(), False, places, self.tier.begin_read(wanted), wanted)
        self._incoming.update(dict.fromkeys(wanted, order.transfer_id))
        self._order(order)
        return order.transfer_id

    def _order(self, order: DiskOrder) -> None:
        self._orders.append(order)
        self._in_flight[order.transfer_id] = order

    # What came of it.

    def complete(self, transfer_id: int, lost: Collection[int]) -> None:
        """Takes the worker's answer: the transfer is done, but for those of its blocks that are `lost`."""
        order, counts = self._in_flight.pop(transfer_id), self._counts
        for number, block_hash in reversed([*enumerate(order.hashes)]):  # the tail of a prefix goes before its head
            failed = number in lost
            if order.to_disk:
                self.tier.end_store(block_hash, failed=failed)
                self._host.end_read((block_hash,))
            else:
                del self._incoming[block_hash]
                self._host.end_store(block_hash, failed=failed)
                self.tier.end_read((block_hash,), failed=failed)
        num_failed = sum(number in lost for number in range(len(order.hashes)))
        if order.to_disk:
            counts.disk_stored_blocks += len(order.hashes) - num_failed
            counts.disk_dropped_blocks += num_failed
        else:
            counts.disk_fetched_blocks += len(order.hashes) - num_failed
            counts.disk_lost_blocks += num_failed
        self.store_offered()

    def clear(self) -> int:
        """Only while nothing moves. Returns how many blocks that were."""
        self._offered.clear()
        return self.tier.clear()
