"""Grammars that the worker compiles once for all sequences under them.

The worker keeps a compiled grammar until the scheduler orders its release. Grammars without users are kept for a while,
so that the next request with the same grammar need not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.port import Prerequisite
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from quire.services.scheduler.core.sequences.sequence import Sequence

# Compiled grammars without users: a compiled grammar takes up to a thousand times the memory of its text.
MAX_IDLE = 128
MAX_IDLE_BYTES = 1 << 20  # of text


@dataclass(frozen=True, slots=True)
class GrammarOrder:
    """Order to the worker to compile the grammar of `sequence`, or to release it if `sequence` is None."""

    grammar_id: bytes
    sequence: Sequence | None


class Grammars(Prerequisite):
    """Grammars of one worker. A sequence joins its grammar when it is added to the core."""

    part = "grammar_id"

    def __init__(self) -> None:
        super().__init__()
        limits = CacheLimits(max_idle=MAX_IDLE, max_idle_size=MAX_IDLE_BYTES)
        self._cache = WorkerCache(limits, self._blocked, prepare=self._order, evict=self._order_release)
        self.orders: list[GrammarOrder] = []  # not sent to the worker yet; see take_orders()

    @property
    def num_users(self) -> int:
        """Number of unfinished sequences under a grammar."""
        return self._cache.num_users

    def join(self, sequence: Sequence) -> bool:
        return self._cache.join(sequence.grammar_id, sequence.grammar_bytes, sequence)

    def leave(self, sequence: Sequence) -> None:
        """Removes a sequence from the users of its grammar. A grammar without users is kept if it is ready or being
        compiled, and dropped otherwise."""
        unused = self._cache.leave(sequence.grammar_id, sequence)
        if unused is not None and not unused.has_place:  # otherwise the worker is compiling it
            self._cache.remove(sequence.grammar_id)

    def complete(self, grammar_id: bytes, *, failed: bool = False) -> list[Sequence]:
        """Handles the worker's answer; returns the sequences that were blocked on it. After a failure, the next
        sequence under the same grammar makes the worker try again."""
        return self._cache.remove(grammar_id) if failed else self._cache.ready(grammar_id)

    def take_orders(self) -> list[GrammarOrder]:
        """Returns and clears the orders for the worker, in this order."""
        orders, self.orders = self.orders, []
        return orders

    def awaits(self, grammar_id: bytes) -> bool:
        """Returns whether a compile order for this grammar is unanswered."""
        return grammar_id in self._cache and not self._cache.is_prepared(grammar_id)

    def check_invariant(self) -> None:
        super().check_invariant()
        self._cache.check_invariant()

    def _order(self, entry: CacheEntry) -> None:
        self.orders.append(GrammarOrder(entry.entry_id, next(iter(entry.users.values()))))

    def _order_release(self, grammar_id: bytes) -> None:
        self.orders.append(GrammarOrder(grammar_id, None))
