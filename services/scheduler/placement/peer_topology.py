"""Workers that can read each other's KV, and the choice of lender for a fetch."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from collections.abc import Sequence as Seq

from quire.services.scheduler.core.prerequisites.peer_blocks import MIN_BLOCKS, BorrowedBlocks, PeerFetches
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.kv.kv_source import KVSource

MAX_FETCH_TICKS = 120  # ticks of a fetch, a few per second: a live worker gives up much earlier, and reports it


class PeerTopology:
    """Peers of all workers of a scheduler. Only workers with equal layouts are peers."""

    def __init__(self, replicas: Mapping[str, Replica], wanted: str) -> None:
        """`wanted`: when to fetch, SchedulerSettings.kv_handover."""
        self._replicas = replicas
        self._wanted = wanted

    def on_workers_changed(self) -> None:
        """Updates the lenders of each worker after workers attached or detached."""
        for replica in self._replicas.values():
            fetches = replica.core.peer_blocks
            if fetches is not None:
                fetches.lenders = PeerView(self, replica) if self.readable_peers(replica) else None

    def on_worker_detached(self, detached: Replica) -> None:
        """Unblocks sequences that waited for blocks of a detached worker, and ends the loans that it had."""
        if detached.core.peer_blocks is not None:
            for order in detached.core.peer_blocks.orders_under_way():
                order.borrowed.release()
        for replica in self._replicas.values():
            if replica.core.peer_blocks is not None:
                replica.unblock(replica.core.peer_blocks.abandon_source(source_of(detached)))

    def tick(self) -> None:
        """Unblocks sequences whose fetch has no answer for too long; called a few times a second."""
        for replica in self._replicas.values():
            if replica.core.peer_blocks is not None and replica.core.peer_blocks.num_in_flight:
                replica.unblock(replica.core.peer_blocks.tick(MAX_FETCH_TICKS))

    def readable_peers(self, replica: Replica) -> list[Replica]:
        """Returns the workers whose KV `replica` can read: same KV layout, same weights and not outdated; none if
        fetches are disabled."""
        layout = replica.hello.kv_transfer.layout
        if self._wanted == "never" or not layout or replica.outdated:
            return []
        others = (other for other in self._replicas.values() if other is not replica and not other.outdated)
        compatible = [
            other for other in others if other.hello.kv_transfer.layout == layout and other.hello.kv_transfer.address
        ]
        return [other for other in compatible if other.weights.update == replica.weights.update]

    def find_longest(self, replica: Replica, hashes: Seq[bytes], start: int, most: int) -> tuple[int, Replica | None]:
        """Returns the worker with the most blocks of a hash chain from index `start` on, as (number of blocks,
        worker)."""
        best: tuple[int, Replica | None] = 0, None
        for other in self.readable_peers(replica):
            count = (
                other.core.peer_blocks.num_found(hashes, start, most)
                if other.core.peer_blocks and not other.leaving
                else 0
            )
            if count > best[0]:
                best = count, other
        return best

    def fetchable(
        self, sequence: Sequence, replica: Replica, num_cached: int, longest: Seq[tuple[int, Replica]]
    ) -> int:
        """Returns the tokens, beyond its `num_cached`, that `replica` need not compute because it can fetch them, less
        what it could compute in that time. `longest`: workers by cached tokens, most first. This is an estimate: the
        lender is chosen again when the sequence is next to run."""
        core, size, layout = replica.core, replica.core.limits.block_size, replica.hello.kv_transfer.layout
        if core.peer_blocks is None or core.peer_blocks.lenders is None or sequence.skip_reading_prefix_cache:
            return 0
        most, lender = next(
            ((n, o) for n, o in longest if o is not replica and o.hello.kv_transfer.layout == layout), (0, replica)
        )
        count = min(most, len(sequence.block_hashes) * size) // size - num_cached // size
        if count < MIN_BLOCKS or not replica.links[lender.id].is_healthy:
            return 0
        token_s = core.estimate_prompt_s(count * size) / (count * size)
        fetch_s = replica.links[lender.id].seconds_for(count * replica.hello.kv_transfer.block_bytes)
        return max(0, count * size - int(fetch_s / token_s)) if token_s else 0

    def is_worth_fetching(self, replica: Replica, lender: Replica, num_blocks: int) -> bool:
        """Returns whether fetching `num_blocks` blocks from `lender` is faster than computing them, or allowed by
        kv_handover "always"; False while fetches over this link fail."""
        link = replica.links[lender.id]
        if not link.allow_attempt():
            return False
        compute_s = replica.core.estimate_prompt_s(num_blocks * replica.core.limits.block_size)
        return self._wanted == "always" or link.is_worth_fetching(
            num_blocks * replica.hello.kv_transfer.block_bytes, compute_s
        )


class PeerView:
    """The other workers, from the point of view of one worker."""

    def __init__(self, peer_topology: PeerTopology, replica: Replica) -> None:
        self._peer_topology, self._replica = peer_topology, replica

    def borrow(self, hashes: Seq[bytes], start: int, most: int) -> BorrowedBlocks | None:
        """Borrows the longest cached run of blocks that another worker has from index `start` on, at most `most`;
        None if it is shorter than MIN_BLOCKS or computing it is faster."""
        replica = self._replica
        count, lender = self._peer_topology.find_longest(replica, hashes, start, most)
        if lender is None or count < MIN_BLOCKS:
            return None
        if not self._peer_topology.is_worth_fetching(replica, lender, count):
            return None
        return borrow_from(lender, hashes, start, count)


def borrow_from(lender: Replica, hashes: Seq[bytes], start: int, count: int) -> BorrowedBlocks:
    """Borrows the cached blocks of `hashes[start : start + count]` from `lender`, which keeps them until `release`
    of the result is called."""
    lender_fetches = lender.core.peer_blocks
    assert isinstance(lender_fetches, PeerFetches), "it shares its blocks"
    loan = lender_fetches.lend(hashes, start, count)
    return BorrowedBlocks(source_of(lender), loan, functools.partial(lender_fetches.end_loan, loan))


def source_of(replica: Replica) -> KVSource:
    return KVSource(replica.id, replica.hello.kv_transfer.address, replica.epoch)
