"""Choice of the worker for a sequence: filter, score, pick."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from quire.services.scheduler.core.sequences.sequence import LateQuery, Sequence
from quire.services.scheduler.replicas.replica import Replica
from quire.shared import rendezvous

Pick = Callable[[Sequence, Seq[Replica]], Replica]
Cached = tuple[int, Replica]  # cached tokens of a sequence on a worker
# Full steps by which a query's worker may have more work than the least loaded one: computing the query costs less.
STEPS_BEHIND = 4

Fetchable = Callable[[Sequence, Replica, int, Seq[Cached]], int]


class Placement:
    """Placement policy over all workers of this scheduler, with exact knowledge of their caches and load."""

    def __init__(self, policy: str, fetchable: Fetchable) -> None:
        """`fetchable`: returns the tokens that a worker can fetch from others instead of computing them."""
        self._fetchable = fetchable
        policies: dict[str, Pick] = {
            "prefix": self._least_left_to_compute,
            "least_loaded": _least_loaded,
            "round_robin": self._next_in_turn,
        }
        self._pick = policies[policy]
        self._turn = 0

    def place(self, sequence: Sequence, replicas: Seq[Replica]) -> Replica | None:
        """Returns the worker for a sequence; None if no worker can take it."""
        fitting = [replica for replica in replicas if not replica.leaving and _fits(sequence, replica)]
        if fitting and sequence.query is not None:
            return _query_replica(sequence.query, fitting)
        return self._pick(sequence, fitting) if fitting else None

    def _least_left_to_compute(self, sequence: Sequence, replicas: Seq[Replica]) -> Replica:
        """Returns the worker with the fewest tokens to compute before the sequence's first token, cached and
        fetchable ones subtracted; the fewest sequences among equals."""
        cached = [(replica.core.num_cached(sequence), replica) for replica in replicas]
        longest = sorted(cached, key=lambda found: -found[0])

        def remaining_work(found: Cached) -> tuple[int, int]:
            num_cached, replica = found
            num_tokens, num_sequences = cost(sequence, replica, num_cached)
            return num_tokens - self._fetchable(sequence, replica, num_cached, longest), num_sequences

        return min(cached, key=remaining_work)[1]

    def _next_in_turn(self, _sequence: Sequence, replicas: Seq[Replica]) -> Replica:
        self._turn += 1
        return replicas[self._turn % len(replicas)]


def _fits(sequence: Sequence, replica: Replica) -> bool:
    """Returns whether the worker's limits allow the sequence, its media and its late-interaction query, however busy
    it is."""
    limits = replica.core.limits
    if sequence.query is not None and limits.refusal_of_query(sequence.query.num_tokens) is not None:
        return False
    if sequence.media and limits.refusal_of_media(sequence.media, sequence.num_tokens) is not None:
        return False
    return limits.refusal(sequence.num_tokens, samples=not sequence.samples_nothing) is None


def _query_replica(query: LateQuery, replicas: Seq[Replica]) -> Replica:
    """Returns the worker that has, or will have, the query's vectors: always the same one of the attached workers, as
    long as it does not have much more work than others."""
    least = min(replica.core.num_pending_tokens for replica in replicas)
    near = (
        replica
        for replica in replicas
        if replica.core.num_pending_tokens - least <= STEPS_BEHIND * replica.core.limits.max_num_batched_tokens
    )
    return max(near, key=lambda replica: rendezvous.weight(query.name, replica.id))


def _least_loaded(_sequence: Sequence, replicas: Seq[Replica]) -> Replica:
    return min(replicas, key=lambda replica: (replica.core.num_pending_tokens, replica.core.num_sequences))


def cost(sequence: Sequence, replica: Replica, num_cached: int) -> tuple[int, int]:
    """Returns the tokens to be computed on a worker, the sequence's uncached ones and the embeddings to be encoded for
    it included, and the number of its sequences."""
    core = replica.core
    num_embeddings = core.encoder_outputs.num_missing(sequence) if sequence.media else 0
    return core.num_pending_tokens + sequence.num_tokens - num_cached + num_embeddings, core.num_sequences
