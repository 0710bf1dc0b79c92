"""Query vectors for late interaction: an internal sequence computes a query's vectors, which stay on the worker, and
the documents that name the query wait until a step is planned in which that sequence ends.

A query occupies vector capacity of the worker from the start of its computation. It stays while a document needs it,
and after that until the capacity is needed.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.prerequisites.port import InternalSequences, Prerequisite, Requeue
from quire.services.scheduler.core.prerequisites.worker_cache import CacheEntry, CacheLimits, WorkerCache
from quire.services.scheduler.core.sequences.sequence import LateQuery, Sequence
from quire.services.scheduler.core.sequences.tokens import SequenceTokens
from quire.shared.kv import block_hash

MAX_IDLE = 8192  # maximum cached queries without documents, whatever the vector capacity
KEYS = itertools.count(2**62)  # keys of internal sequences; no submission has such a key


class QueryVectors(Prerequisite):
    """Query vectors of one worker. A document joins its query when it is added to the core."""

    part = "query"

    def __init__(
        self,
        max_vectors: int,
        hashed_block_size: int,
        counts: CoreCounts,
        internal: InternalSequences,
        requeue: Requeue,
    ) -> None:
        """`hashed_block_size`: tokens of a prefix cache block; 0: no prefix cache."""
        super().__init__()
        limits = CacheLimits(max_idle=MAX_IDLE, capacity=max_vectors)
        self._cache = WorkerCache(limits, self._blocked, prepare=self._compute, evict=self._evict)
        self._hashed_block_size, self._counts = hashed_block_size, counts
        self._internal, self._requeue = internal, requeue
        self._computing: dict[bytes, Sequence] = {}  # by query name, until the result is applied
        self.dropped: list[bytes] = []  # not named by a plan yet; see take_dropped()

    def __len__(self) -> int:
        return len(self._cache)

    @property
    def num_vectors(self) -> int:
        """Number of vectors that occupy capacity, those of idle queries included."""
        return self._cache.size

    def join(self, sequence: Sequence) -> bool:
        """Adds a document to the users of its query; returns whether the vectors are ready. If not, the document is
        blocked, and the internal sequence of the query becomes as urgent as the document. Sequences without a query,
        and queries themselves, need not wait."""
        query = sequence.query
        if query is None or sequence.is_query:
            return True
        is_ready = self._cache.join(query.name, query.num_tokens, sequence)
        self._counts.compared_documents += 1
        self._counts.query_hits += is_ready
        computing = None if is_ready else self._computing.get(query.name)
        if computing is not None and computing.priority > sequence.priority:
            self._requeue.raise_priority(computing, sequence.priority)  # as urgent as the most urgent of its documents
        return is_ready

    def leave(self, sequence: Sequence) -> None:
        """Removes a document from the users of its query. If that was the last one and the vectors are not ready,
        the query's internal sequence is withdrawn."""
        query = sequence.query
        if query is None or sequence.is_query:
            return
        unwanted = self._cache.leave(query.name, sequence)
        if unwanted is not None:
            computing = self._computing.pop(query.name, None)
            if computing is not None:
                self._internal.withdraw(computing)
            self._cache.remove(query.name)

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Marks the vectors of queries among `sequences` as ready, as the step being planned completes them; returns
        the documents that were blocked on them."""
        freed: list[Sequence] = []
        for sequence in sequences if self._computing else ():
            if self._computes(sequence):
                freed = self._cache.ready(_query_of(sequence).name) + freed
        return freed

    def on_computed(self, sequence: Sequence, *, failed: bool) -> list[Sequence]:
        """Handles the result of a query's internal sequence. After a failure, drops the query and returns the
        documents, which fail with it; otherwise returns none."""
        if not self._computes(sequence):
            return []
        name = _query_of(sequence).name
        del self._computing[name]
        return self._cache.remove(name) if failed else []

    def dependents(self, sequence: Sequence) -> list[Sequence]:
        return self._blocked.on(_query_of(sequence).name) if self._computes(sequence) else []

    def reset(self) -> None:
        """Drops all vectors, as the worker does; no step is in flight. Documents that were ready to run are blocked
        until their queries have been computed again."""
        self.dropped.clear()
        lost = self._cache.reset()
        for entry in lost:
            for document in entry.users.values():
                self._requeue.block(document)
        for entry in lost:
            self._compute(entry)

    def take_dropped(self) -> list[bytes]:
        """Returns and clears the names of queries that the worker has to drop with the next plan."""
        dropped, self.dropped = self.dropped, []
        return dropped

    def check_invariant(self) -> None:
        super().check_invariant()
        self._cache.check_invariant()
        assert all(name in self._cache for name in self._computing), "nothing is computed without a document"

    def _computes(self, sequence: Sequence) -> bool:
        """Returns whether `sequence` is the one that computes its query; the query may have been dropped meanwhile."""
        return sequence.is_query and self._computing.get(_query_of(sequence).name) is sequence

    def _compute(self, entry: CacheEntry) -> None:
        """Submits an internal sequence that computes the query of an entry for the documents that wait for it; it
        inherits owner, tenant and the most urgent priority from them."""
        documents = list(entry.users.values())
        first = documents[0]
        query = _query_of(first)
        sequence = Sequence(
            key=next(KEYS),
            owner=first.owner,
            sequence_id=first.sequence_id,
            tokens=SequenceTokens(query.tokens),
            num_prompt_tokens=query.num_tokens,
            max_total_tokens=query.num_tokens,
            root_hash=first.root_hash,
            skip_reading_prefix_cache=True,
            samples_nothing=True,
            query=query,
            is_query=True,
            adapter=first.adapter,
            payload=query.payload,
            request_id=first.request_id,
            priority=min(document.priority for document in documents),
            tenant=first.tenant,
            arrival=first.arrival,
            order=first.order,
            losses=max((document.losses for document in documents), key=len),
        )
        if self._hashed_block_size:
            hashes = block_hash.chain(sequence.root_hash, query.tokens, self._hashed_block_size)
            sequence.block_hashes = list(hashes)
        self._computing[entry.entry_id] = sequence
        self._internal.submit(sequence)

    def _evict(self, name: bytes) -> None:
        self._computing.pop(name, None)
        self.dropped.append(name)


def _query_of(sequence: Sequence) -> LateQuery:
    assert sequence.query is not None, "it is a query or is compared with one"
    return sequence.query
