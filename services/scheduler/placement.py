"""Which worker a sequence goes to: filter, score, pick."""

from __future__ import annotations

from collections.abc import Iterable

from services.scheduler.core.sequence import Sequence
from services.scheduler.replicas.replica import Replica


def place(sequence: Sequence, replicas: Iterable[Replica]) -> Replica | None:
    """The replica with the least to compute before this sequence has its first token; None if none can take it."""
    fitting = [r for r in replicas if not r.leaving and r.core.limits.refusal(sequence.num_tokens) is None]
    return min(fitting, key=lambda replica: cost(sequence, replica), default=None)


def cost(sequence: Sequence, replica: Replica) -> tuple[int, int]:
    """Tokens still to be computed there, the sequence's own uncached ones included; then sequences there."""
    core = replica.core
    hits = 0 if sequence.skip_reading_prefix_cache else len(core.kv.match(sequence.block_hashes))
    uncached = sequence.num_tokens - hits * core.limits.block_size
    return core.num_pending_tokens + uncached, core.num_sequences
