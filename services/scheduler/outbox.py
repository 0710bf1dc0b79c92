"""What goes to a frontend: a step is a message, unless the frontend falls behind. Then steps that wait are merged."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from shared.columns import I32, U32, i32, u32
from shared.pb.scheduler.v1 import scheduler_pb2 as pb

MOST_TOKENS = 1 << 16  # in a message; gRPC takes 4 MB
TOKEN_BYTES = ID_BYTES = 4


class Link(Protocol):
    """The session's stream."""

    @property
    def last_unsent(self) -> pb.SessionResponse | None:
        """What was sent last, if it still waits to be written."""

    def send(self, message: pb.SessionResponse) -> None: ...


class Outbox:
    """`send` never blocks, and what waits grows by bytes, not by messages."""

    def __init__(self, link: Link) -> None:
        self._link = link

    def send(self, message: pb.SessionResponse) -> None:
        last = self._link.last_unsent
        if last is not None and _is_plain(last) and _is_plain(message) and _fit(last.tokens, message.tokens):
            merge(last.tokens, message.tokens)
        else:
            self._link.send(message)


def merge(batch: pb.TokenBatch, later: pb.TokenBatch) -> None:
    """Adds `later` to `batch`. Neither holds log-probabilities."""
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


def _counts(batch: pb.TokenBatch) -> U32:
    counts = u32(batch.token_counts)
    return counts if len(counts) else np.ones(len(batch.sequence_ids) // ID_BYTES, dtype=np.uint32)


def _fit(batch: pb.TokenBatch, later: pb.TokenBatch) -> bool:
    return len(batch.token_ids) + len(later.token_ids) <= TOKEN_BYTES * MOST_TOKENS


def _is_plain(message: pb.SessionResponse) -> bool:
    """A step without log-probabilities, whose columns would have to be put in order as well."""
    if message.WhichOneof("message") != "tokens":
        return False
    return not (message.tokens.HasField("logprobs") or message.tokens.HasField("prompt_logprobs"))
