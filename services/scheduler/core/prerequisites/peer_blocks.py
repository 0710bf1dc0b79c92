"""KV blocks fetched from other workers, and blocks lent to them, concurrent to the steps.

A sequence whose prefix continues in another worker's cache, where its own worker's cache ends, is blocked until those
blocks are here; it then finds them like any cached prefix. Both workers hold the blocks until the borrower has reported
the end of the fetch, so no sequence takes or writes them meanwhile. Whether a fetch is faster than computing is for the
BlockLenders to decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from collections.abc import Sequence as Blocks
from dataclasses import dataclass
from typing import Protocol

from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.prerequisites.port import BlockSource
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.kv_cache.kv_cache_manager import KVCacheManager

MIN_BLOCKS = 2  # minimum blocks that are worth the wait
MAX_FETCHES = 2  # maximum fetches of a sequence; if the blocks are evicted again before its admission, it computes them

# Id ranges of block holders; transfers count from 1.
FIRST_FETCH = 1 << 40
FIRST_LOAN = 1 << 44
FIRST_KEPT = 1 << 48


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks of one worker that stay unchanged until the loan ends."""

    loan_id: int
    blocks: list[int]
    after_step: int  # the content is complete once this step has been computed


@dataclass(frozen=True, slots=True)
class BorrowedBlocks:
    """Blocks that another worker lends and keeps unchanged until `release` is called."""

    source: object  # the lending worker; opaque here
    loan: Loan
    release: Callable[[], None]  # ends the loan, once the borrower is done


class BlockLenders(Protocol):
    """The other workers, from the point of view of one worker."""

    def borrow(self, hashes: Blocks[bytes], start: int, most: int) -> BorrowedBlocks | None:
        """Borrows the blocks of a hash chain from index `start` on, at most `most` and at least MIN_BLOCKS; returns
        None where computing them is not slower."""


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Order to a worker: the blocks to fetch and their local targets."""

    fetch_id: int
    borrowed: BorrowedBlocks
    blocks: list[int]  # targets, in the order of the loan's blocks
    hashes: list[bytes]


@dataclass(slots=True)
class _PendingFetch:
    """Fetch that the worker has not reported as ended."""

    order: FetchOrder
    holder: int | None  # reservation that gets the blocks; None: they become free cached blocks
    num_ticks: int = 0  # ticks since it was ordered


class PeerFetches(BlockSource):
    """KV block fetches from and loans to other workers. A sequence joins a fetch when it is next to run."""

    def __init__(self, kv: KVCacheManager, counts: CoreCounts, last_step: Callable[[], int]) -> None:
        """`last_step`: returns the id of the last planned step."""
        super().__init__()
        assert kv.groups.plain, "blocks of several groups stay where they are"
        self.lenders: BlockLenders | None = None  # None: no fetches
        self._kv = kv
        self._counts = counts
        self._last_step = last_step
        self._fetch_ids, self._loan_ids = itertools.count(FIRST_FETCH), itertools.count(FIRST_LOAN)
        self._kept_ids = itertools.count(FIRST_KEPT)
        self._kept: set[int] = set()
        self._orders: list[FetchOrder] = []
        self._in_flight: dict[int, _PendingFetch] = {}
        self._incoming: dict[bytes, int] = {}  # hashes on their way here, and their fetches
        self._lent: dict[int, Loan] = {}
        self._refused_key: int | None = (
            None  # key of the last sequence without a lender; admission retries it in every step
        )

    # State.

    @property
    def is_available(self) -> bool:
        return self.lenders is not None

    @property
    def num_in_flight(self) -> int:
        """Number of fetches, and of loans to others."""
        return len(self._in_flight) + len(self._lent)

    def awaits(self, fetch_id: int) -> bool:
        """Returns whether the worker has not reported the end of this fetch yet."""
        return fetch_id in self._in_flight

    def order(self, fetch_id: int) -> FetchOrder:
        """Returns the order of a fetch in flight."""
        return self._in_flight[fetch_id].order

    def num_found(self, hashes: Blocks[bytes], start: int, most: int) -> int:
        """Returns the number of consecutive blocks of a hash chain that are cached here, from index `start` on."""
        find, end = self._kv.pool.find, min(len(hashes), start + most)
        return next((i - start for i in range(start, end) if find(hashes[i]) is None), max(end - start, 0))

    def take_orders(self) -> list[FetchOrder]:
        orders, self._orders = self._orders, []
        return orders

    # Loans.

    def lend(self, hashes: Blocks[bytes], start: int, count: int) -> Loan:
        """Lends the cached blocks of `hashes[start : start + count]` and holds them until end_loan(); raises
        AssertionError if one is not cached."""
        found = [self._kv.pool.find(block_hash) for block_hash in hashes[start : start + count]]
        loan = Loan(next(self._loan_ids), [block for block in found if block is not None], self._last_step())
        assert len(loan.blocks) == count, "they were found"
        self._kv.hold_blocks(loan.loan_id, loan.blocks)
        self._lent[loan.loan_id] = loan
        return loan

    def end_loan(self, loan: Loan) -> None:
        """Ends a loan: the borrower no longer reads the blocks."""
        del self._lent[loan.loan_id]
        self._kv.release_held(loan.loan_id)

    # Reservations for a sequence that migrates here.

    def open_reservation(self, blocks: Blocks[int]) -> int:
        """Holds blocks until close_reservation(). Returns the reservation's id; order_fetch() can add blocks to it."""
        holder = next(self._kept_ids)
        self._kept.add(holder)
        self._kv.hold_blocks(holder, blocks)
        return holder

    def close_reservation(self, holder: int) -> None:
        """Ends a reservation; blocks that are still on their way become free cached blocks."""
        for fetch in self._in_flight.values():
            if fetch.holder == holder:
                fetch.holder = None
        if holder in self._kept:
            self._kept.discard(holder)
            self._kv.release_held(holder)

    def num_incoming(self, holder: int) -> int:
        """Returns the number of fetches whose blocks the reservation will hold."""
        return sum(fetch.holder == holder for fetch in self._in_flight.values())

    def release_reserved_blocks(self) -> None:
        """Releases the blocks of all reservations; the reservations stay open, and fetches can add blocks to them."""
        for holder in self._kept:
            self._kv.release_held(holder)
            self._kv.hold_blocks(holder, ())

    # Fetches.

    def fetch(self, sequence: Sequence, found: Blocks[int], most: int) -> bool:
        """Orders blocks of another worker that continue the prefix after `found`, at most `most` blocks, or joins a
        fetch already in flight for them. Returns whether `sequence` is blocked until it ends; False if no worker
        lends them or the sequence has used up its fetches."""
        if self.lenders is None or sequence.num_fetches >= MAX_FETCHES or sequence.key == self._refused_key:
            return False
        hashes, start = sequence.block_hashes, len(found)
        fetch_id = self._incoming.get(hashes[start]) if start < len(hashes) else None
        if fetch_id is None:
            borrowed = self.lenders.borrow(hashes, start, most) if most >= MIN_BLOCKS else None
            if borrowed is None:
                self._refused_key = sequence.key
                return False
            fetch_id = self.order_fetch(borrowed, found, hashes[start : start + len(borrowed.loan.blocks)])
        sequence.num_fetches += 1
        self._blocked.add(fetch_id, sequence)
        return True

    def order_fetch(
        self, borrowed: BorrowedBlocks, found: Blocks[int], hashes: list[bytes], *, holder: int | None = None
    ) -> int:
        """Orders a fetch; the caller has checked that there is room. `found`: blocks that must still be cached when the
        fetched ones arrive; `holder`: reservation that gets the fetched blocks."""
        fetch_id = next(self._fetch_ids)
        self._kv.hold_blocks(fetch_id, found)
        order = FetchOrder(fetch_id, borrowed, self._kv.allocate_for(fetch_id, len(hashes)), hashes)
        self._orders.append(order)
        self._in_flight[fetch_id] = _PendingFetch(order, holder)
        self._incoming.update(dict.fromkeys(hashes, fetch_id))
        return fetch_id

    def complete(self, fetch_id: int, *, failed: bool) -> list[Sequence]:
        """Handles the end of a fetch: records the hashes of the blocks unless it failed, ends the loan, and returns
        the sequences that waited for it, in order of arrival. After a failure these compute the blocks and do not
        fetch again."""
        fetch = self._in_flight.pop(fetch_id)
        order = fetch.order
        for block, block_hash in zip(order.blocks, order.hashes, strict=True):
            if self._incoming.get(block_hash) == fetch_id:
                del self._incoming[block_hash]
            if not failed:
                self._kv.pool.record_hash(block, block_hash)
        if failed:
            self._counts.failed_fetches += 1
        else:
            self._counts.fetches += 1
            self._counts.blocks_from_others += len(order.blocks)
            if fetch.holder is not None:
                self._kv.hold_blocks(fetch.holder, order.blocks)
        self._kv.release_held(fetch_id)
        order.borrowed.release()
        freed = self._blocked.free(fetch_id)
        return _without_further_fetches(freed) if failed else freed

    def abandon_source(self, source: object) -> list[Sequence]:
        """Returns the sequences that waited for blocks of a worker that is gone: they compute the blocks."""
        fetches = [fetch for fetch in self._in_flight.values() if fetch.order.borrowed.source == source]
        return [sequence for fetch in fetches for sequence in self._stop_waiting(fetch)]

    def tick(self, max_ticks: int) -> list[Sequence]:
        """Counts a tick for each fetch; returns the sequences that have waited for more than `max_ticks`: they compute
        the blocks."""
        freed: list[Sequence] = []
        for fetch in self._in_flight.values():
            fetch.num_ticks += 1
            if fetch.num_ticks > max_ticks and self._blocked.on(fetch.order.fetch_id):
                freed += self._stop_waiting(fetch)
        return freed

    def orders_under_way(self) -> list[FetchOrder]:
        return [fetch.order for fetch in self._in_flight.values()]

    def _stop_waiting(self, fetch: _PendingFetch) -> list[Sequence]:
        """Unblocks and returns the sequences that wait for a fetch; they do not fetch again. The blocks stay held
        until the worker has reported the end of the fetch."""
        for block_hash in fetch.order.hashes:
            if self._incoming.get(block_hash) == fetch.order.fetch_id:
                del self._incoming[block_hash]
        return _without_further_fetches(self._blocked.free(fetch.order.fetch_id))


def _without_further_fetches(sequences: list[Sequence]) -> list[Sequence]:
    """Marks and returns sequences that compute the missing blocks: they do not wait for a fetch again."""
    for sequence in sequences:
        sequence.num_fetches = MAX_FETCHES
    return sequences
