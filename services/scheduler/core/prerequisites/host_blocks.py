"""KV offloading: transfers of blocks between a worker's device and the tiers below it, concurrent to the steps.

Blocks that steps fill are copied to host memory as soon as their hashes are recorded. A sequence whose cached prefix
continues in a lower tier, where the device's cache ends, is blocked until those blocks are on the device; it then finds
them like any cached prefix. Blocks on disk are read into host memory first. tier_lookup.py decides which pages of
sliding windows and recurrent states are stored, and which of them a start needs. A transfer holds its blocks until the
worker has reported its end, so no sequence takes or writes them meanwhile.
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
from quire.services.scheduler.core.transfers.orders import MAX_WAITS, DiskOrder, TransferOrder
from quire.services.scheduler.core.transfers.tier_lookup import IsStored, NeededPages, tier_lookup_of
from quire.services.scheduler.kv_cache.block_frequency import BlockFrequency
from quire.services.scheduler.kv_cache.block_tier import BlockTier
from quire.services.scheduler.kv_cache.eviction import POLICIES
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from quire.shared.kv.block_hash import page_of

STORING_SHARE = 2  # at most 1 / STORING_SHARE of all blocks is held by transfers to host memory


class HostBlocks(BlockSource):
    """Transfers between one worker's device, its host memory and its disk. A sequence joins them when it is next to
    run."""

    def __init__(self, kv: KVCacheManager, tiers: TierLimits, counts: CoreCounts) -> None:
        """Creates empty tiers of these sizes, and makes the KV cache manager collect filled blocks from now on."""
        super().__init__()
        make = POLICIES[tiers.policy]
        self.tier = BlockTier(tiers.num_host_blocks, make)
        self._kv = kv
        self._counts = counts
        self._ids = itertools.count(1)
        self._orders: list[TransferOrder] = []
        self._in_flight: dict[int, TransferOrder] = {}
        self._incoming: dict[bytes, int] = {}  # page names on their way to the device, and their transfers
        self._most_storing = max(1, kv.pool.num_blocks // STORING_SHARE)
        self._filled: deque[tuple[int, bytes]] = deque(
            maxlen=kv.pool.num_blocks
        )  # (block, hash) pairs that are still to be stored
        self._lookup = tier_lookup_of(kv)
        self._has_threshold, self._has_forks = tiers.store_threshold > 1, kv.groups.has_windows
        counted = self._has_threshold or self._has_forks
        self._block_frequency = BlockFrequency(max(1, tiers.store_threshold)) if counted else None
        self.disk: DiskTransfers | None = None
        if tiers.num_disk_blocks:
            on_disk = BlockTier(tiers.num_disk_blocks, make)
            self.disk = DiskTransfers(self.tier, on_disk, counts, lambda: next(self._ids))
        self._most_waits = MAX_WAITS * (1 if self.disk is None else 2)
        kv.track_filled()

    # State.

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight) + (0 if self.disk is None else self.disk.num_in_flight)

    def awaits(self, transfer_id: int) -> bool:
        """Returns whether the worker has not reported the end of this transfer yet."""
        return transfer_id in self._in_flight or (self.disk is not None and self.disk.awaits(transfer_id))

    def num_following(self, hashes: Blocks[bytes], found: Blocks[int], most: int) -> int:
        """Returns the number of block positions, at most `most`, that could be fetched to follow the blocks `found` on
        the device."""
        return self._lookup.num_following(hashes, found, most, self._holds)

    @property
    def _holds(self) -> IsStored:
        """Predicate: whether a page is stored in a tier below the device."""
        if self.disk is None:
            return self.tier.holds
        host, disk = self.tier.holds, self.disk.tier.holds
        return lambda name: host(name) or disk(name)

    def take_orders(self) -> Blocks[TransferOrder | DiskOrder]:
        """Returns and clears the transfer orders, in the order in which the worker must get them, after the plans
        already sent."""
        orders, self._orders = self._orders, []
        return orders if self.disk is None else [*orders, *self.disk.take_orders()]

    # Orders.

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """Marks the stored pages of the sequence's prompt as used again. Pages on the device that were not worth
        storing before may be now."""
        hashes, frequency = sequence.block_hashes, self._block_frequency
        fork = frequency.num_leading(hashes) if frequency is not None and self._has_forks else 0
        names, restart_pages = self._lookup.register_prompt(sequence, num_found, fork)
        for tier in (self.tier,) if self.disk is None else (self.tier, self.disk.tier):
            tier.set_priority(names, sequence.kv_priority)
            tier.touch(names)
        if frequency is not None:
            reached = frozenset(frequency.count_prompt(hashes))
            if self._has_threshold:
                self._offer(name for name in names if page_of(name)[1] in reached)
        self._offer(restart_pages)

    def release_slot(self, sequence: Sequence) -> None:
        """Offers the pages at the end of `sequence` for storing: another sequence may continue from there."""
        self._offer(self._lookup.pages_at_end(sequence.block_hashes, int(self._kv.num_hashed[sequence.slot])))

    def _offer(self, names: Iterable[bytes]) -> None:
        """Queues pages for storing, as far as they are on the device."""
        found = ((self._kv.pool.find(name), name) for name in names)
        self._filled += [(block, name) for block, name in found if block is not None]

    def store_filled(self) -> None:
        """Orders copies of filled blocks to host memory, in order, as far as there is room, and holds them until the
        transfer ends; skips blocks that are stored already, are not worth storing, or that the device has evicted
        meanwhile."""
        self._filled += self._kv.take_filled()
        to_store: list[tuple[int, int, bytes]] = []
        max_blocks = self._most_storing - self.tier.num_storing
        while self._filled and len(to_store) < max_blocks:
            block, block_hash = self._filled[0]
            if self._is_worth_storing(block_hash) and self._kv.pool.find(block_hash) == block:
                place = self.tier.begin_store(block_hash)
                if place is None:
                    break
                to_store.append((block, place, block_hash))
            self._filled.popleft()
        if to_store:
            blocks, places, hashes = map(list, zip(*to_store, strict=True))
            order = self._order(TransferOrder(next(self._ids), True, blocks, places, hashes))
            self._kv.hold_blocks(order.transfer_id, blocks)

    def _is_worth_storing(self, name: bytes) -> bool:
        """Returns whether a page is to be copied to host memory: it is not there or on its way, and either there is
        no store threshold, it has high priority, or enough prompts have contained it."""
        if self.tier.holds_or_stores(name):
            return False
        if not self._has_threshold or self.tier.is_high(name):
            return True
        return self._block_frequency is not None and self._block_frequency.has_reached_threshold(page_of(name)[1])

    def fetch(self, sequence: Sequence, found: Blocks[int], most: int) -> bool:
        """Orders the transfer of blocks that continue the prefix after `found`, at most `most` block positions,
        first from disk to host memory if necessary, or joins a transfer in flight. Returns whether `sequence` is
        blocked until it ends; False if nothing worth the wait is stored."""
        if sequence.num_fetches >= self._most_waits:
            return False
        pages = self._pages(sequence, found, most, self._holds)
        transfer_id = self._incoming_transfer(pages)
        if transfer_id is None:
            if self._waits_for_disk(sequence, pages.names):
                return True
            if self.disk is not None:
                pages = self._pages(sequence, found, most, self.tier.holds)
                transfer_id = self._incoming_transfer(pages)
        if transfer_id is None:
            if not pages.names:
                return False
            transfer_id = self._order_read(pages)
        sequence.num_fetches += 1
        self._blocked.add(transfer_id, sequence)
        return True

    def _incoming_transfer(self, pages: NeededPages) -> int | None:
        """Returns a transfer in flight that brings some of the pages, or None."""
        return next((self._incoming[name] for name in pages.names if name in self._incoming), None)

    def _pages(self, sequence: Sequence, found: Blocks[int], most: int, holds: IsStored) -> NeededPages:
        """Returns the pages for the longest prefix that is worth the wait and fits in host memory; no pages if there is
        no such prefix."""
        hashes, lookup = sequence.block_hashes, self._lookup
        while (count := lookup.num_following(hashes, found, most, holds)) >= lookup.least:
            pages = lookup.pages(hashes, found, count)
            excess = len(pages.names) - self.tier.num_places
            if excess <= 0 or self._kv.groups.plain:
                return pages
            most = count + -excess // self._kv.num_groups  # one position less is at most one page less of each group
        return NeededPages([], [])

    def _waits_for_disk(self, sequence: Sequence, wanted: list[bytes]) -> bool:
        """Orders a read of the wanted pages that are only on disk into host memory and blocks `sequence` until it
        ends; returns whether it did."""
        if self.disk is None or sequence.num_fetches >= MAX_WAITS or all(map(self.tier.holds, wanted)):
            return False
        transfer_id = self.disk.order_read(wanted)
        if transfer_id is None:
            return False
        sequence.num_fetches += 1
        self._blocked.add(transfer_id, sequence)
        return True

    def _order_read(self, pages: NeededPages) -> int:
        """Orders the transfer of pages from host memory to newly allocated device blocks; needed pages on the device
        are held until it ends. Returns the transfer's id."""
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

    # Results.

    def complete(self, transfer_id: int, *, failed: bool, lost: Collection[int] = ()) -> list[Sequence]:
        """Handles the end of a transfer; returns the sequences that waited for it, in order of arrival. `lost`: indices
        of blocks that the disk did not store or return."""
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
        """Ends the copies of blocks to host memory; unless they failed, counts them and offers them to the disk, if
        there is one."""
        for block_hash in reversed(hashes):  # the tail of a prefix is evicted before its head
            self.tier.end_store(block_hash, failed=failed)
        if failed:
            return
        self._counts.stored_blocks += len(hashes)
        if self.disk is not None:
            self.disk.offer(hashes)

    def clear(self) -> int:
        """Drops everything stored below the device; only valid while no transfer is in flight. Returns the number of
        dropped blocks."""
        self._kv.take_filled()
        self._filled.clear()
        return self.tier.clear() + (0 if self.disk is None else self.disk.clear())
