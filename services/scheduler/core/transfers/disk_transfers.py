"""Transfers of blocks between a worker's host memory and its disk.

Blocks in host memory are written to disk, a few at a time, so that blocks evicted from host memory are on disk. They
are read back into host memory when a prompt needs them, and move to the device from there. The worker judges how long a
read may take and whether a block on disk is intact; blocks that it cannot read are computed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from collections.abc import Sequence as Blocks

from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.transfers.orders import DiskOrder
from quire.services.scheduler.kv_cache.block_tier import BlockTier

MAX_STORING = 64  # blocks written at a time: reads of waiting prompts share the disk
LOADING_SHARE = 2  # at most 1 / LOADING_SHARE of the host places wait for the disk
ORDER_BLOCKS = 16  # blocks per write order


class DiskTransfers:
    """Decides which blocks are written to disk and which are read back."""

    def __init__(self, host: BlockTier, tier: BlockTier, counts: CoreCounts, next_id: Callable[[], int]) -> None:
        """Starts without transfers. `host`, `tier`: the places in host memory and on disk; `next_id`: returns ids
        that are unique among all transfers of the worker."""
        self.tier = tier
        self._host = host
        self._counts = counts
        self._next_id = next_id
        self._orders: list[DiskOrder] = []
        self._in_flight: dict[int, DiskOrder] = {}
        self._incoming: dict[bytes, int] = {}  # hashes on their way to host memory, and their transfers
        self._offered: deque[bytes] = deque(maxlen=host.num_places)
        self._most_storing = max(1, min(MAX_STORING, host.num_places // 4))
        self._most_loading = max(1, host.num_places // LOADING_SHARE)

    # State.

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def awaits(self, transfer_id: int) -> bool:
        return transfer_id in self._in_flight

    def take_orders(self) -> list[DiskOrder]:
        orders, self._orders = self._orders, []
        return orders

    # Orders.

    def offer(self, hashes: Iterable[bytes]) -> None:
        """Offers blocks in host memory to the disk. If too many wait to be written, the oldest offers are dropped."""
        self._offered += hashes
        self.store_offered()

    def store_offered(self) -> None:
        """Orders writes of offered blocks, in order, as far as there is room; skips blocks that host memory has evicted
        meanwhile."""
        to_store: list[tuple[int, bytes]] = []
        while self._offered and self.tier.num_storing < self._most_storing:
            block_hash = self._offered[0]
            if self._host.holds(block_hash) and not self.tier.holds_or_stores(block_hash):
                place = self.tier.begin_store(block_hash)
                if place is None:
                    break
                to_store.append((place, block_hash))
            self._offered.popleft()
        for start in range(0, len(to_store), ORDER_BLOCKS):
            disk_places, hashes = map(list, zip(*to_store[start : start + ORDER_BLOCKS], strict=True))
            self._order(DiskOrder(self._next_id(), True, self._host.pin(hashes), disk_places, hashes))

    def order_read(self, hashes: Blocks[bytes]) -> int | None:
        """Returns a transfer after which as many blocks of the chain are in host memory as there is room for; None if
        no missing block can be read. Each of `hashes` is in host memory, on its way there, or on disk."""
        transfer_id = next((self._incoming[block_hash] for block_hash in hashes if block_hash in self._incoming), None)
        if transfer_id is not None:
            return transfer_id
        in_host = [block_hash for block_hash in hashes if self._host.holds(block_hash)]
        self._host.pin(in_host)  # otherwise the read blocks evict them
        to_read: list[tuple[int, bytes]] = []
        max_blocks = self._most_loading - len(self._incoming)
        for block_hash in hashes:
            if self._host.holds_or_stores(block_hash):
                continue
            place = self._host.begin_store(block_hash) if len(to_read) < max_blocks else None
            if place is None:
                break
            to_read.append((place, block_hash))
        self._host.end_read(in_host)
        if not to_read:
            return None
        places, wanted = map(list, zip(*to_read, strict=True))
        order = DiskOrder(self._next_id(), False, places, self.tier.begin_read(wanted), wanted)
        self._incoming.update(dict.fromkeys(wanted, order.transfer_id))
        self._order(order)
        return order.transfer_id

    def _order(self, order: DiskOrder) -> None:
        self._orders.append(order)
        self._in_flight[order.transfer_id] = order

    # Results.

    def complete(self, transfer_id: int, lost: Collection[int]) -> None:
        """Handles the end of a transfer: updates both tiers and the counters, then orders writes that waited for
        room. `lost`: indices, in the order's hashes, of blocks that were not stored or read."""
        order, counts = self._in_flight.pop(transfer_id), self._counts
        for number, block_hash in reversed(
            [*enumerate(order.hashes)]
        ):  # the tail of a prefix is evicted before its head
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
        """Drops everything on disk; only valid while no transfer is in flight. Returns the number of dropped blocks."""
        self._offered.clear()
        return self.tier.clear()
