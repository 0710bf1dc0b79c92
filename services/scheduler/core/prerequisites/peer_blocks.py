"""Blocks that come from other workers, and those that others get from this one, beside the steps.

A sequence whose prompt goes on in another worker's cache, where its own worker's ends, waits, blocked, until those
blocks are here; it then finds them as any cached prefix. Both ends hold the blocks until the worker that gets them has
told that it is done: nobody takes or writes them meanwhile. What is worth its way is for the lenders to say.
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

LEAST_BLOCKS = 2  # that are worth the wait
MOST_FETCHES = 2  # of a sequence: whoever loses its blocks again before it comes in computes them

# Holders of blocks beside the transfers, which are counted from 1.
FIRST_FETCH = 1 << 40
FIRST_LOAN = 1 << 44
FIRST_KEPT = 1 << 48


@dataclass(frozen=True, slots=True)
class Loan:
    """Blocks of one worker that stay as they are until they are given back."""

    loan_id: int
    blocks: list[int]
    after_step: int  # what they hold is there once this step has been computed


@dataclass(frozen=True, slots=True)
class BorrowedBlocks:
    """Blocks that another worker gives."""

    source: object  # that worker; not looked at here
    loan: Loan
    release: Callable[[], None]  # once the worker that got them is done


class BlockLenders(Protocol):
    """The other workers, as one of them sees them."""

    def borrow(self, hashes: Blocks[bytes], start: int, most: int) -> BorrowedBlocks | None:
        """The blocks of a chain from the one at `start` on that another worker has, at most `most` and at least
        LEAST_BLOCKS; None where computing them takes no longer."""


@dataclass(frozen=True, slots=True)
class FetchOrder:
    """Order to a worker: blocks to fetch, and where they go."""

    fetch_id: int
    borrowed: BorrowedBlocks
    blocks: list[int]  # where it goes, in the order of the loan's
    hashes: list[bytes]


@dataclass(slots=True)
class _PendingFetch:
    order: FetchOrder
    holder: int | None  # keeps the blocks when they have come; None: whoever wants them takes them
    num_ticks: int = 0  # at it, since it was ordered


class PeerFetches(BlockSource):
    """KV block fetches from other workers and loans to them. A sequence joins a fetch as the next to run."""

    def __init__(self, kv: KVCacheManager, counts: CoreCounts, last_step: Callable[[], int]) -> None:
        """`last_step`: the last that was ordered."""
        super().__init__()
        assert kv.groups.plain, "blocks of several groups stay where they are"
        self.lenders: BlockLenders | None = None  # none: nothing comes
        self._kv = kv
        self._counts = counts
        self._last_step = last_step
        self._fetch_ids, self._loan_ids = itertools.count(FIRST_FETCH), itertools.count(FIRST_LOAN)
        self._kept_ids = itertools.count(FIRST_KEPT)
        self._kept: set[int] = set()
        self._orders: list[FetchOrder] = []
        self._in_flight: dict[int, _PendingFetch] = {}
        self._incoming: dict[bytes, int] = {}  # by which fetch
        self._lent: dict[int, Loan] = {}
        self._refused_key: int | None = None  # the last sequence for which nothing came: it is looked at in every step

    # What is asked.

    @property
    def is_available(self) -> bool:
        return self.lenders is not None

    @property
    def num_in_flight(self) -> int:
        """Fetches, and loans to others."""
        return len(self._in_flight) + len(self._lent)

    def awaits(self, fetch_id: int) -> bool:
        """Whether the worker owes word of this fetch."""
        return fetch_id in self._in_flight

    def order(self, fetch_id: int) -> FetchOrder:
        """Under way."""
        return self._in_flight[fetch_id].order

    def num_found(self, hashes: Blocks[bytes], start: int, most: int) -> int:
        """How many blocks of a chain, from the one at `start` on, are here."""
        find, end = self._kv.pool.find, min(len(hashes), start + most)
        return next((i - start for i in range(start, end) if find(hashes[i]) is None), max(end - start, 0))

    def take_orders(self) -> list[FetchOrder]:
        orders, self._orders = self._orders, []
        return orders

    # What others get.

    def lend(self, hashes: Blocks[bytes], start: int, count: int) -> Loan:
        """Lends blocks that are here, until they are given back."""
        found = [self._kv.pool.find(block_hash) for block_hash in hashes[start : start + count]]
        loan = Loan(next(self._loan_ids), [block for block in found if block is not None], self._last_step())
        assert len(loan.blocks) == count, "they were found"
        self._kv.hold_blocks(loan.loan_id, loan.blocks)
        self._lent[loan.loan_id] = loan
        return loan

    def end_loan(self, loan: Loan) -> None:
        """Ends a loan: the borrower reads its blocks no longer."""
        del self._lent[loan.loan_id]
        self._kv.release_held(loan.loan_id)

    # What is kept for a sequence that comes from another worker.

    def open_reservation(self, blocks: Blocks[int]) -> int:
        """Holds blocks until let_go(). Returns the holder, which bring() can add others to."""
        holder = next(self._kept_ids)
        self._kept.add(holder)
        self._kv.hold_blocks(holder, blocks)
        return holder

    def close_reservation(self, holder: int) -> None:
        """Ends a holder; blocks that are still coming are free to any sequence."""
        for fetch in self._in_flight.values():
            if fetch.holder == holder:
                fetch.holder = None
        if holder in self._kept:
            self._kept.discard(holder)
            self._kv.release_held(holder)

    def num_incoming(self, holder: int) -> int:
        """Fetches whose blocks it will keep."""
        return sum(fetch.holder == holder for fetch in self._in_flight.values())

    def release_reserved_blocks(self) -> None:
        """The blocks; what keeps them goes on, and others may come to it."""
        for holder in self._kept:
            self._kv.release_held(holder)
            self._kv.hold_blocks(holder, ())

    # What comes.

    def fetch(self, sequence: Sequence, found: Blocks[int], most: int) -> bool:
        """Brings what comes behind the blocks `found`, at most `most` blocks. Whether the sequence has to wait for
        that."""
        if self.lenders is None or sequence.num_fetches >= MOST_FETCHES or sequence.key == self._refused_key:
            return False
        hashes, start = sequence.block_hashes, len(found)
        coming = self._incoming.get(hashes[start]) if start < len(hashes) else None
        if coming is None:
            borrowed = self.lenders.borrow(hashes, start, most) if most >= LEAST_BLOCKS else None
            if borrowed is None:
                self._refused_key = sequence.key
                return False
            coming = self.order_fetch(borrowed, found, hashes[start : start + len(borrowed.loan.blocks)])
        sequence.num_fetches += 1
        self._blocked.add(coming, sequence)
        return True

    def order_fetch(
        self, borrowed: BorrowedBlocks, found: Blocks[int], hashes: list[bytes], *, holder: int | None = None
    ) -> int:
        """There is room for them. `found`: what must still be there when they come; `holder`: keeps them then."""
        fetch_id = next(self._fetch_ids)
        self._kv.hold_blocks(fetch_id, found)
        order = FetchOrder(fetch_id, borrowed, self._kv.allocate_for(fetch_id, len(hashes)), hashes)
        self._orders.append(order)
        self._in_flight[fetch_id] = _PendingFetch(order, holder)
        self._incoming.update(dict.fromkeys(hashes, fetch_id))
        return fetch_id

    def complete(self, fetch_id: int, *, failed: bool) -> list[Sequence]:
        """The worker is done with it: those who waited, in the order in which they came."""
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
        return _computing(freed) if failed else freed

    def abandon_source(self, source: object) -> list[Sequence]:
        """Returns the sequences that waited for blocks of a worker that is gone: they compute them."""
        gone = [fetch for fetch in self._in_flight.values() if fetch.order.borrowed.source == source]
        return [sequence for fetch in gone for sequence in self._wait_no_more(fetch)]

    def tick(self, max_ticks: int) -> list[Sequence]:
        """Counts a look at each fetch; returns the sequences that have waited for too many: they compute the blocks."""
        freed: list[Sequence] = []
        for fetch in self._in_flight.values():
            fetch.num_ticks += 1
            if fetch.num_ticks > max_ticks and self._blocked.on(fetch.order.fetch_id):
                freed += self._wait_no_more(fetch)
        return freed

    def orders_under_way(self) -> list[FetchOrder]:
        return [fetch.order for fetch in self._in_flight.values()]

    def _wait_no_more(self, fetch: _PendingFetch) -> list[Sequence]:
        """The blocks stay held until the worker has told what became of them; nobody else waits for them."""
        for block_hash in fetch.order.hashes:
            if self._incoming.get(block_hash) == fetch.order.fetch_id:
                del self._incoming[block_hash]
        return _computing(self._blocked.free(fetch.order.fetch_id))


def _computing(sequences: list[Sequence]) -> list[Sequence]:
    """Marks sequences that compute what did not come: they do not wait again."""
    for sequence in sequences:
        sequence.num_fetches = MOST_FETCHES
    return sequences
