"""Queries that documents are compared with, token by token (late interaction): one sequence computes a query's vectors,
which stay with the worker, and the documents that name it wait until a step is planned in which that ends.

A query has its place among the vectors that the worker keeps from when it begins. It stays while a document needs it,
and then until the place is wanted, the least recently used going first: what is under way never loses its query.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass, field

from quire.services.scheduler.core.sequences.sequence import LateQuery, Sequence

MOST_IDLE = 8192  # queries that nobody needs at present: so many are remembered, whatever the worker has room for
KEYS = itertools.count(2**62)  # of the sequences that compute them: no submission's


@dataclass(slots=True)
class _Held:
    """A query that somebody needs, or that is still there."""

    query: LateQuery
    users: dict[int, Sequence] = field(default_factory=dict)  # documents that have not ended, by key
    blocked: dict[int, Sequence] = field(default_factory=dict)  # of these, by key
    sequence: Sequence | None = None  # that computes it, until its result is here
    has_place: bool = False
    ready: bool = False  # whoever comes in from the step on that is being planned finds its vectors


class WorkerQueries:
    """Which queries the worker has, and who needs or awaits them."""

    def __init__(self, most_vectors: int) -> None:
        self._most = most_vectors
        self._num_vectors = 0  # of those that have a place
        self._held: dict[bytes, _Held] = {}  # by name
        self._idle: OrderedDict[bytes, None] = OrderedDict()  # those without users, the longest idle first
        self._lacking: dict[bytes, None] = {}  # those without a place, in order of arrival
        self._begun: list[Sequence] = []
        self._dropped: list[bytes] = []

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_vectors(self) -> int:
        """That have a place, the idle ones' included."""
        return self._num_vectors

    @property
    def num_blocked(self) -> int:
        return sum(len(held.blocked) for held in self._held.values())

    def blocked(self) -> list[Sequence]:
        return [document for held in self._held.values() for document in held.blocked.values()]

    def join(self, document: Sequence) -> bool:
        """Whether `document` can run; else it is blocked until ordered() or failed() names it."""
        query = _query_of(document)
        held = self._held.get(query.name)
        if held is None:
            held = self._held[query.name] = _Held(query)
        self._idle.pop(query.name, None)
        held.users[document.key] = document
        if not held.ready:
            held.blocked[document.key] = document
        if len(held.users) == 1 and not held.ready:
            self._lacking[query.name] = None
            self._give_places()
        return held.ready

    def leave(self, document: Sequence) -> Sequence | None:
        """`document` will not run here (any more). Returns the sequence that computes a query for nobody now."""
        name = _query_of(document).name
        held = self._held.get(name)
        if held is None:
            return None  # it failed, and took its documents along
        held.users.pop(document.key, None)
        held.blocked.pop(document.key, None)
        if held.users or name in self._idle:
            return None
        if held.ready:
            self._idle[name] = None
            if len(self._idle) > MOST_IDLE:
                self._drop(next(iter(self._idle)))
            self._give_places()
            return None
        self._remove(name)
        self._begun = [begun for begun in self._begun if begun is not held.sequence]
        return held.sequence

    def computing(self, document: Sequence) -> Sequence | None:
        """The sequence that computes its query, until its result is here."""
        held = self._held.get(_query_of(document).name)
        return None if held is None else held.sequence

    def take_begun(self) -> list[Sequence]:
        """Sequences that are to be queued: each computes a query for which there is a place now."""
        begun, self._begun = self._begun, []
        return begun

    def waiting_for(self, sequence: Sequence) -> list[Sequence]:
        """Documents that are blocked until this has computed their query."""
        held = self._of(sequence)
        return [] if held is None else list(held.blocked.values())

    def ordered(self, sequence: Sequence) -> list[Sequence]:
        """The step that is being planned computes the last of a query: the documents that come in now find it."""
        held = self._of(sequence)
        if held is None:
            return []
        held.ready = True
        freed = list(held.blocked.values())
        held.blocked.clear()
        return freed

    def computed(self, sequence: Sequence) -> None:
        """The worker has its vectors."""
        held = self._of(sequence)
        if held is not None:
            held.sequence = None

    def failed(self, sequence: Sequence) -> list[Sequence]:
        """They cannot be had: the documents that need them. The next one to come makes the worker try again."""
        held = self._of(sequence)
        if held is None:
            return []
        self._remove(held.query.name)
        return list(held.users.values())

    def forget(self) -> list[Sequence]:
        """The worker has no vectors any more, and no step is under way. Returns documents that could run, and are
        blocked now until their queries have been computed again."""
        self._dropped.clear()
        for name in list(self._idle):
            self._remove(name)
        freed: list[Sequence] = []
        for held in self._held.values():
            if held.ready:
                held.ready = False
                held.blocked = dict(held.users)
                freed += held.users.values()
                self._begin(held)
        return freed

    def take_dropped(self) -> list[bytes]:
        """Names that the worker is to forget with the next plan."""
        if not self._dropped:
            return []
        dropped, self._dropped = self._dropped, []
        return dropped

    def _of(self, sequence: Sequence) -> _Held | None:
        """None if the query has been dropped meanwhile, or is computed by another one since."""
        held = self._held.get(_query_of(sequence).name)
        return held if held is not None and held.sequence is sequence else None

    def _give_places(self) -> None:
        """To those who lack one, as far as there are some: nobody overtakes."""
        for name in list(self._lacking):
            held = self._held[name]
            size = held.query.num_tokens
            while self._num_vectors + size > self._most and self._idle:
                self._drop(next(iter(self._idle)))
            if self._num_vectors + size > self._most:
                return
            self._begin(held)
            del self._lacking[name]
            self._num_vectors += size
            held.has_place = True

    def _begin(self, held: _Held) -> None:
        users = list(held.users.values())
        first = users[0]
        held.sequence = Sequence(
            key=next(KEYS),
            owner=first.owner,
            sequence_id=first.sequence_id,
            tokens=bytearray(held.query.tokens),
            num_prompt_tokens=held.query.num_tokens,
            max_total_tokens=held.query.num_tokens,
            root_hash=first.root_hash,
            skip_reading_prefix_cache=True,
            samples_nothing=True,
            query=held.query,
            is_query=True,
            adapter=first.adapter,
            payload=held.query.payload,
            request_id=first.request_id,
            priority=min(document.priority for document in users),
            tenant=first.tenant,
            arrival=first.arrival,
            order=first.order,
            losses=max((document.losses for document in users), key=len),
        )
        self._begun.append(held.sequence)

    def _drop(self, name: bytes) -> None:
        """It is idle, and its place is wanted."""
        self._remove(name)
        self._dropped.append(name)

    def _remove(self, name: bytes) -> None:
        held = self._held.pop(name)
        self._idle.pop(name, None)
        self._lacking.pop(name, None)
        if held.has_place:
            self._num_vectors -= held.query.num_tokens


def _query_of(sequence: Sequence) -> LateQuery:
    assert sequence.query is not None, "it is a query or is compared with one"
    return sequence.query
