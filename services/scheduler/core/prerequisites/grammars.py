"""Grammars that the worker prepares once for all sequences under them.

The worker keeps what it was told to prepare until it is told to release it. Grammars without users stay for a while, so
that the next request of the same form need not wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from quire.services.scheduler.core.prerequisites.port import Prerequisite
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from quire.services.scheduler.core.sequences.sequence import Sequence

# Prepared grammars that no sequence needs: a compiled one takes up to a thousand times its text.
MOST_IDLE = 128
MOST_IDLE_BYTES = 1 << 20  # of text


@dataclass(frozen=True, slots=True)
class GrammarOrder:
    """Tells the worker to prepare the grammar of `sequence`, or to release it, if there is none."""

    grammar_id: bytes
    sequence: Sequence | None


class Grammars(Prerequisite):
    """Grammars of one worker. A sequence joins its grammar when it comes to the core."""

    def __init__(self) -> None:
        super().__init__()
        limits = CacheLimits(max_idle=MOST_IDLE, max_idle_size=MOST_IDLE_BYTES)
        self._cache = WorkerCache(limits, self._blocked, prepare=self._order, evict=self._order_release)
        self._orders: list[GrammarOrder] = []

    @property
    def num_users(self) -> int:
        """Sequences under a grammar that have not ended."""
        return self._cache.num_users

    def join(self, sequence: Sequence) -> bool:
        return not sequence.grammar_id or self._cache.join(sequence.grammar_id, sequence.grammar_bytes, sequence)

    def leave(self, sequence: Sequence) -> None:
        if not sequence.grammar_id:
            return
        unused = self._cache.leave(sequence.grammar_id, sequence)
        if unused is not None and not unused.has_place:  # else the worker is preparing it
            self._cache.remove(sequence.grammar_id)

    def complete(self, grammar_id: bytes, *, failed: bool = False) -> list[Sequence]:
        """Takes the worker's answer; returns the sequences that were blocked on it. After a failure the next sequence
        under the same grammar makes the worker try again."""
        return self._cache.remove(grammar_id) if failed else self._cache.ready(grammar_id)

    def take_orders(self) -> list[GrammarOrder]:
        """Returns what the worker has to be sent, in this order."""
        orders, self._orders = self._orders, []
        return orders

    def awaits(self, grammar_id: bytes) -> bool:
        """Returns whether the worker has been told to prepare this grammar and has not answered."""
        return grammar_id in self._cache and not self._cache.is_prepared(grammar_id)

    def check_invariant(self) -> None:
        super().check_invariant()
        self._cache.check_invariant()

    def _order(self, entry: CacheEntry) -> None:
        self._orders.append(GrammarOrder(entry.entry_id, next(iter(entry.users.values()))))

    def _order_release(self, grammar_id: bytes) -> None:
        self._orders.append(GrammarOrder(grammar_id, None))
