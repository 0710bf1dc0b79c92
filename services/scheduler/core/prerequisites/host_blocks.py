"""Blocks that move between a worker's device and what lies below it, beside the steps.

What steps fill is copied to host memory as soon as it is on record. A sequence whose prompt goes on there, where the
device's cache ends, waits, blocked, until those blocks are back; it then finds them as if they had never left. What
lies on disk comes to host memory first. Which pages of windows and states are stored, and what a start takes of them,
says reach.py. A transfer holds its blocks until the worker has told that it is done: nobody takes or writes them
meanwhile.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterable
from collections.abc import Sequence as Blocks

from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.limits import TierLimits
from quire.services.scheduler.core.prerequisites.port import BlockSource
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.core.transfers.disk_transfers import DiskTransfers
from quire.services.scheduler.core.transfers.orders import MOST_WAITS, DiskOrder, TransferOrder
from quire.services.scheduler.core.transfers.tier_lookup import IsStored, NeededPages, tier_lookup_of
from quire.services.scheduler.kv_cache.block_frequency import BlockFrequency
from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.services.scheduler.kv_cache.eviction import POLICIES
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from quire.shared.kv.block_hash import page_of

STORING_SHARE = 2  # at most one of so many blocks is held by transfers to host memory


class HostBlocks(BlockSource):
    """Transfers between one worker's device, its host memory and its disk. A sequence joins them as the next to run."""

    def __init__(self, kv: KVCacheManager, tiers: TierLimits, counts: CoreCounts) -> None:
        super().__init__()
        make = POLICIES[tiers.policy]
        self.tier = BlockTier(tiers.num_host_blocks, make)
        self._kv = kv
        self._counts = counts
        self._ids = itertools.count(1)
        self._orders: list[TransferOrder] = []
        self._in_flight: dict[int, TransferOrder] = {}
        self._incoming: dict[bytes, int] = {}  # what is on its way to the device, and by which transfer
        self._most_storing = max(1, kv.pool.num_blocks // STORING_SHARE)
        self._filled: deque[tuple[int, bytes]] = deque(maxlen=kv.pool.num_blocks)  # yet to be stored, and their hashes
        self._lookup = tier_lookup_of(kv)
        self._has_threshold, self._has_forks = tiers.store_threshold > 1, kv.groups.has_windows
        counted = self._has_threshold or self._has_forks
        self._block_frequency = BlockFrequency(max(1, tiers.store_threshold)) if counted else None
        self.disk: DiskTransfers | None = None
        if tiers.num_disk_blocks:
            on_disk = BlockTier(tiers.num_disk_blocks, make)
            self.disk = DiskTransfers(self.tier, on_disk, counts, lambda: next(self._ids))
        self._most_waits = MOST_WAITS * (1 if self.disk is None else 2)
        kv.track_filled()

    # What is asked.

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) + (0 if self.disk is None else self.disk.num_in_flight)

    def awaits(self, transfer_id: int) -> bool:
        """Whether the worker owes word of this transfer."""
        return transfer_id in self._in_flight or (self.disk is not None and self.disk.awaits(transfer_id))

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int) -> int:
        """How many block positions of a chain, at most `most`, could be brought back behind the blocks `found` on the
        device."""
        return self._lookup.num_following(hashes, found, most, self._holds)

    @property
    def _holds(self) -> IsStored:
        """Whether a page lies below the device."""
        if self.disk is None:
            return self.tier.holds
        host, disk = self.tier.holds, self.disk.tier.holds
        return lambda name: host(name) or disk(name)

    def take_orders(self) -> Blocks[TransferOrder | DiskOrder]:
        """Returns what the worker has to be sent, in this order, after the plans that have been sent."""
        orders, self._orders = self._orders, []
        return orders if self.disk is None else [*orders, *self.disk.take_orders()]

    # What is ordered.

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """Notes that the prompt of `sequence` is wanted again, as far as it lies below the device. Pages on the device
        that were not worth storing before may be by now."""
        hashes, sightings = sequence.block_hashes, self._block_frequency
        fork = sightings.num_leading(hashes) if sightings is not None and self._has_forks else 0
        names, started = self._lookup.register_prompt(sequence, num_found, fork)
        for tier in (self.tier,) if self.disk is None else (self.tier, self.disk.tier):
            tier.set_priority(names, sequence.kv_priority)
            tier.touch(names)
        if sightings is not None:
            reached = frozenset(sightings.count_prompt(hashes))
            if self._has_threshold:
                self._offer(name for name in names if page_of(name)[1] in reached)
        self._offer(started)

    def release_slot(self, sequence: Sequence) -> None:
        """Offers the pages at the end of `sequence`: another one may go on from there."""
        self._offer(self._lookup.pages_at_end(sequence.block_hashes, int(self._kv.num_hashed[sequence.slot])))

    def _offer(self, names: Iterable[bytes]) -> None:
        """Notes pages that are worth storing, if the device has them."""
        found = ((self._kv.pool.find(name), name) for name in names)
        self._filled += [(block, name) for block, name in found if block is not None]

    def store_filled(self) -> None:
        """Copies to host memory what the steps that are ordered fill, in turn, as far as there is room for it; what the
        device has lost meanwhile is passed over."""
        self._filled += self._kv.take_filled()
        found: list[tuple[int, int, bytes]] = []
        room = self._most_storing - self.tier.num_storing
        while self._filled and len(found) < room:
            block, block_hash = self._filled[0]
            if self._is_worth_storing(block_hash) and self._kv.pool.find(block_hash) == block:
                place = self.tier.begin_store(block_hash)
                if place is None:
                    break
                found.append((block, place, block_hash))
            self._filled.popleft()
        if found:
            blocks, places, hashes = map(list, zip(*found, strict=True))
            order = self._order(TransferOrder(next(self._ids), True, blocks, places, hashes))
            self._kv.hold_blocks(order.transfer_id, blocks)

    def _is_worth_storing(self, name: bytes) -> bool:
        if self.tier.holds_or_stores(name):
            return False
        if not self._has_threshold or self.tier.is_high(name):
            return True
        return self._block_frequency is not None and self._block_frequency.has_reached_threshold(page_of(name)[1])

    def fetch(self, sequence: Sequence, found: Blocks[int], most: int) -> bool:
        """Brings back what comes behind the blocks `found` on the device, at most `most` block positions. Whether it
        has to wait for that."""
        if sequence.num_fetches >= self._most_waits:
            return False
        pages = self._pages(sequence, found, most, self._holds)
        coming = self._incoming_transfer(pages)
        if coming is None:
            if self._waits_for_disk(sequence, pages.names):
                return True
            if self.disk is not None:
                pages = self._pages(sequence, found, most, self.tier.holds)
                coming = self._incoming_transfer(pages)
        if coming is None:
            if not pages.names:
                return False
            coming = self._order_read(pages)
        sequence.num_fetches += 1
        self._blocked.add(coming, sequence)
        return True

    def _incoming_transfer(self, pages: NeededPages) -> int | None:
        """The transfer that brings some of them."""
        return next((self._incoming[name] for name in pages.names if name in self._incoming), None)

    def _pages(self, sequence: Sequence, found: Blocks[int], most: int, holds: IsStored) -> NeededPages:
        """Returns the pages for the furthest start that is worth the wait and has room in host memory; none if there is
        no such start."""
        hashes, reach = sequence.block_hashes, self._lookup
        while (count := reach.num_following(hashes, found, most, holds)) >= reach.least:
            pages = reach.pages(hashes, found, count)
            excess = len(pages.names) - self.tier.num_places
            if excess <= 0 or self._kv.groups.plain:
                return pages
            most = count + -excess // self._kv.num_groups  # a position less is a page less of each group at most
        return NeededPages([], [])

    def _waits_for_disk(self, sequence: Sequence, wanted: list[bytes]) -> bool:
        """Blocks `sequence` until those of the wanted pages that are not in host memory have come there."""
        if self.disk is None or sequence.num_fetches >= MOST_WAITS or all(map(self.tier.holds, wanted)):
            return False
        coming = self.disk.order_read(wanted)
        if coming is None:
            return False
        sequence.num_fetches += 1
        self._blocked.add(coming, sequence)
        return True

    def _order_read(self, pages: NeededPages) -> int:
        """Orders pages from host memory; those that are on the device are held until the others come."""
        transfer_id, names = next(self._ids), pages.names
        self._kv.hold_blocks(transfer_id, pages.kept)
        blocks = self._kv.allocate_for(transfer_id, len(names))
        self._order(TransferOrder(transfer_id, False, blocks, self.tier.begin_read(names), names))
        self._incoming.update(dict.fromkeys(names, transfer_id))
        self._counts.fetched_blocks += len(names)
        return transfer_id

    def _order(self, order: TransferOrder) -> TransferOrder:
        self._orders.append(order)
        self._in_flight[order.transfer_id] = order
        return order

    # What came of it.

    def complete(self, transfer_id: int, *, failed: bool, lost: Collection[int] = ()) -> list[Sequence]:
        """The worker is done with it: those who waited, in the order in which they came. `lost`: blocks that the disk
        did not take or give."""
        freed = self._blocked.free(transfer_id)
        if self.disk is not None and self.disk.awaits(transfer_id):
            self.disk.complete(transfer_id, range(self.tier.num_places) if failed else lost)
            return freed
        order = self._in_flight.pop(transfer_id)
        if order.to_host:
            self._stored(order.hashes, failed=failed)
        else:
            self.tier.end_read(order.hashes, failed=failed)
            for block, block_hash in zip(order.blocks, order.hashes, strict=True):
                del self._incoming[block_hash]
                if not failed:
                    self._kv.pool.record_hash(block, block_hash)
        self._counts.failed_transfers += failed
        self._kv.release_held(transfer_id)
        if self._filled:
            self.store_filled()
        return freed

    def _stored(self, hashes: list[bytes], *, failed: bool) -> None:
        for block_hash in reversed(hashes):  # the tail of a prefix goes before its head
            self.tier.end_store(block_hash, failed=failed)
        if failed:
            return
        self._counts.stored_blocks += len(hashes)
        if self.disk is not None:
            self.disk.offer(hashes)

    def clear(self) -> int:
        """Forgets what lies below the device; only while nothing moves. Returns how many blocks that were."""
        self._kv.take_filled()
        self._filled.clear()
        return self.tier.clear() + (0 if self.disk is None else self.disk.clear())
