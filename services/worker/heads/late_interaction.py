"""Late interaction: caches the token vectors of queries by name, and reduces a document to one score against
its query.

The scheduler decides which slots are queries or documents and when a query is dropped: it accounts for the capacity
(services/scheduler/core/prerequisites/late_queries.py). A query counts with all of its tokens, as it does there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.services.worker.heads.max_sim import TokenVectors, max_sim
from quire.services.worker.step.admission import SlotAdmission
from quire.shared.columns import I32, NUMBER_BYTES
from quire.shared.errors import FailedPrecondition, InvalidArgument, QuireError
from quire.shared.settings import WorkerSettings

NAME_BYTES = 32
ELEMENT_BYTES = 4
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class LateRole:
    """Role of a slot in late interaction: a query, or a document and the query that it is scored against."""

    name: bytes  # name of the query
    is_query: bool  # else a document that is scored against the query


@dataclass(frozen=True, slots=True)
class ScoredDocuments:
    """Documents of a step by index: those with a score, in the order of `scores`, and those that failed."""

    scored: list[int]
    scores: Tensor | None  # float32 [num_scored]
    failed: dict[int, QuireError]


class LateInteractionScorer:
    """Query cache and document scoring of one worker. Steps come in order, and in each step queries precede
    documents."""

    def __init__(self, size: int, cache_bytes: int) -> None:
        """`size`: elements of a vector; `cache_bytes`: capacity for query vectors, which are allocated as queries
        arrive."""
        self._vector_bytes = ELEMENT_BYTES * size
        self.max_query_vectors = cache_bytes // self._vector_bytes
        self._roles: dict[int, LateRole] = {}  # by slot
        self._num_tokens: dict[bytes, int] = {}  # tokens of the admitted queries, by name
        self._vectors: dict[bytes, Tensor] = {}  # float32 [num_vectors, size] by name, of the computed queries

    @classmethod
    def from_settings(cls, settings: WorkerSettings, size: int) -> LateInteractionScorer:
        """Creates the scorer for vectors of `size` elements with a query cache of query_cache_mb."""
        return cls(size, settings.query_cache_mb * MIB)

    @property
    def max_query_bytes(self) -> int:
        """Upper bound of the device memory of the cached vectors."""
        return self.max_query_vectors * self._vector_bytes

    def admit(self, slot: int, admission: SlotAdmission) -> LateRole:
        """Stores the role of a sequence with a vector per token, and reserves capacity for a query's vectors. Raises
        InvalidArgument for a malformed query id, FailedPrecondition if the capacity is exceeded."""
        if len(admission.query_id) != NAME_BYTES:
            text = f"query_id: {len(admission.query_id)} bytes, expected {NAME_BYTES}"
            raise InvalidArgument(text, field="query_id")
        late = LateRole(admission.query_id, admission.is_query)
        if late.is_query:
            self._reserve_vectors(late.name, len(admission.token_ids) // NUMBER_BYTES)
        self._roles[slot] = late
        return late

    def _reserve_vectors(self, name: bytes, num_tokens: int) -> None:
        """Counts a query's tokens against the capacity, replacing an earlier count of that name. Raises
        FailedPrecondition if they do not fit."""
        others = sum(count for other, count in self._num_tokens.items() if other != name)
        if others + num_tokens > self.max_query_vectors:
            text = (
                f"query_id: a query of {num_tokens} tokens in addition to {others} of other queries exceeds the "
                "capacity of "
                f"{self.max_query_vectors}"
            )
            raise FailedPrecondition(text, field="query_id")
        self._num_tokens[name] = num_tokens

    def release(self, slot: int) -> None:
        """Drops the slot's role; a query that was not computed also gives back its capacity, a computed one stays
        cached until it is dropped."""
        late = self._roles.pop(slot, None)
        if late is not None and late.is_query and late.name not in self._vectors:
            self._num_tokens.pop(late.name, None)  # cancelled before it was computed

    def drop_queries(self, names: bytes) -> None:
        """Drops cached queries before the next step; `names`: concatenated query names."""
        for at in range(0, len(names), NAME_BYTES):
            name = names[at : at + NAME_BYTES]
            self._vectors.pop(name, None)
            self._num_tokens.pop(name, None)

    def clear_queries(self) -> None:
        """Drops all queries, when weights have changed or the attachment has ended."""
        self._vectors.clear()
        self._num_tokens.clear()

    def store_queries(self, slots: Sequence[int], vectors: Tensor, starts: I32) -> None:
        """Caches copies of `vectors`, float32 [num_vectors, size], of the queries in `slots`, which begin at `starts`
        [num_slots + 1], by query name."""
        for slot, begin, end in zip(slots, starts[:-1].tolist(), starts[1:].tolist(), strict=True):
            self._vectors[self._roles[slot].name] = vectors[
                begin:end
            ].clone()  # a view would keep the whole step's tensor alive

    def score_documents(self, slots: Sequence[int], vectors: Tensor, starts: I32) -> ScoredDocuments:
        """Scores the documents in `slots`, whose `vectors`, float32 [num_vectors, size], begin at `starts` [num_slots +
        1], against their cached queries by MaxSim. A document without its query, or of another vector size, fails
        alone."""
        names = [self._roles[slot].name for slot in slots]
        failed = {index: error for index, name in enumerate(names) if (error := self._score_error(name, vectors))}
        scored = [index for index in range(len(names)) if index not in failed]
        if not scored:
            return ScoredDocuments([], None, failed)
        documents = TokenVectors(vectors, starts[:-1].astype(np.intp), np.diff(starts).astype(np.intp))
        if failed:
            documents = documents.select(np.array(scored))
        return ScoredDocuments(scored, max_sim(self._queries([names[index] for index in scored]), documents), failed)

    def _queries(self, names: Sequence[bytes]) -> TokenVectors:
        """Gathers the vectors of the named queries, those of a repeated name once."""
        distinct = {name: index for index, name in enumerate(dict.fromkeys(names))}
        vectors = [self._vectors[name] for name in distinct]
        ends = np.cumsum([0, *map(len, vectors)])
        together = TokenVectors(vectors[0] if len(vectors) == 1 else torch.cat(vectors), ends[:-1], np.diff(ends))
        return together.select(np.array([distinct[name] for name in names], dtype=np.intp))

    def _score_error(self, name: bytes, vectors: Tensor) -> QuireError | None:
        """Returns the error if documents with `vectors` cannot be scored against the query `name`: not cached, or of
        another vector size; None if they can."""
        query = self._vectors.get(name)
        if query is None:
            return FailedPrecondition(f"query_id: the vectors of query {name.hex()} are not cached", field="query_id")
        if query.size(1) != vectors.size(1):
            text = f"pooling.dimensions: {vectors.size(1)} elements cannot be compared with the query's {query.size(1)}"
            return InvalidArgument(text, field="pooling.dimensions")
        return None


def admit(late: LateInteractionScorer | None, slot: int, admission: SlotAdmission, by_token: bool) -> LateRole | None:
    """Stores and returns the late-interaction role of a sequence, None if it has none. Raises QuireError.

    `late`: None if this model does not support late interaction; `by_token`: the sequence has a vector per token.
    """
    if not admission.query_id:
        return None
    if late is None:
        raise InvalidArgument("query_id: this model does not support late interaction", field="query_id")
    if not by_token:
        text = "query_id: late interaction needs a vector per token: use POOLER_ALL"
        raise InvalidArgument(text, field="query_id")
    return late.admit(slot, admission)
