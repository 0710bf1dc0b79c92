"""Messages to a frontend: one per step, unless the frontend is slow; then queued steps are merged."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from quire.shared.columns import I32, U32, i32, u32
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

MAX_TOKENS = 1 << 16  # tokens per message; gRPC's limit is 4 MB
TOKEN_BYTES = ID_BYTES = 4


class Link(Protocol):
    """Outgoing stream of a frontend session."""

    @property
    def last_unsent(self) -> pb.SessionResponse | None:
        """The last message sent, if it has not been written yet."""

    def send(self, message: pb.SessionResponse) -> None: ...


class Outbox:
    """Sends without blocking; what is queued grows by bytes, not by messages."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self._merged: pb.SessionResponse | None = None  # the queued message that others were merged into
        self._sequences: set[int] = set()  # ids of the sequences with tokens in it

    def send(self, message: pb.SessionResponse) -> None:
        """Sends a message without blocking; merges it into the last one if that is unwritten, both are steps with
        tokens alone, and they fit into one message."""
        last = self._link.last_unsent
        if last is not None and _is_plain(last) and _is_plain(message) and _fit(last.tokens, message.tokens):
            self._merge(last, message.tokens)
        else:
            self._link.send(message)

    def _merge(self, last: pb.SessionResponse, later: pb.TokenBatch) -> None:
        """Merges a step into the queued message. Steps of different workers usually have no sequence in common: then
        their columns are concatenated."""
        if self._merged is not last:
            self._merged, self._sequences = last, _ids(last.tokens)
        sequences = _ids(later)
        if self._sequences.isdisjoint(sequences):
            concatenate(last.tokens, later)
        else:
            merge(last.tokens, later)
        self._sequences |= sequences


def concatenate(batch: pb.TokenBatch, later: pb.TokenBatch) -> None:
    """Appends `later` to `batch`; they have no sequence in common and no log-probabilities."""
    if batch.token_counts or later.token_counts:
        batch.token_counts = _counts(batch).tobytes() + _counts(later).tobytes()
    batch.sequence_ids += later.sequence_ids
    batch.token_ids += later.token_ids
    if later.started:
        batch.started.extend(later.started)
    if later.finished:
        batch.finished.extend(later.finished)


def merge(batch: pb.TokenBatch, later: pb.TokenBatch) -> None:
    """Merges `later` into `batch`, sequence by sequence in ascending order of ids; neither has log-probabilities. A
    sequence in both has its tokens in one row afterwards."""
    ids = np.concatenate([u32(batch.sequence_ids), u32(later.sequence_ids)])
    if len(ids):
        tokens: I32 = np.concatenate([i32(batch.token_ids), i32(later.token_ids)])
        counts = np.concatenate([_counts(batch), _counts(later)])
        sequences, rows = np.unique(ids, return_inverse=True)
        in_order = np.argsort(np.repeat(rows, counts), kind="stable")
        batch.sequence_ids = sequences.tobytes()
        batch.token_counts = np.bincount(rows, weights=counts).astype(np.uint32).tobytes()
        batch.token_ids = tokens[in_order].tobytes()
    batch.started.extend(later.started)
    batch.finished.extend(later.finished)


def _ids(batch: pb.TokenBatch) -> set[int]:
    return set(memoryview(batch.sequence_ids).cast("I"))


def _counts(batch: pb.TokenBatch) -> U32:
    counts = u32(batch.token_counts)
    return counts if len(counts) else np.ones(len(batch.sequence_ids) // ID_BYTES, dtype=np.uint32)


def _fit(batch: pb.TokenBatch, later: pb.TokenBatch) -> bool:
    return len(batch.token_ids) + len(later.token_ids) <= TOKEN_BYTES * MAX_TOKENS


def _is_plain(message: pb.SessionResponse) -> bool:
    """Returns whether a message is a step with tokens alone: log-probabilities and vectors have columns that would need
    sorting as well."""
    if not message.HasField("tokens"):
        return False
    tokens = message.tokens
    return not any(map(tokens.HasField, ("logprobs", "prompt_logprobs", "pooled")))
