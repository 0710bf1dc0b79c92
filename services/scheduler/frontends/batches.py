"""Converts the events of a core to one TokenBatch per frontend session."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.plan import (
    Events,
    LogprobColumns,
    PooledOutput,
    PromptLogprobsPart,
    SequenceFinished,
    SequenceStarted,
    TokenColumns,
)
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.values.weights import AT_START
from quire.shared.columns import NUMBER_BYTES, u32, u32_bytes
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

REASONS = {
    Reason.STOP: finish_pb2.FINISH_REASON_STOP,
    Reason.LENGTH: finish_pb2.FINISH_REASON_LENGTH,
    Reason.CANCELLED: finish_pb2.FINISH_REASON_CANCELLED,
    Reason.DEADLINE: finish_pb2.FINISH_REASON_DEADLINE,
    Reason.ERROR: finish_pb2.FINISH_REASON_ERROR,
    Reason.REPETITION: finish_pb2.FINISH_REASON_REPETITION,
}
FROM_WIRE = {wire: reason for reason, wire in REASONS.items()}

Part = TypeVar("Part", PromptLogprobsPart, PooledOutput)


class OwnerBatches:
    """Collects the events of each owner; a message holds at most one set of token columns, so that a step is one
    message."""

    def __init__(self, weight_version: str = "") -> None:
        """`weight_version`: version of the weights that computed all events."""
        self._weight_version = "" if weight_version == AT_START else weight_version
        self.by_owner: dict[int, list[pb.SessionResponse]] = {}

    def add(self, events: Events) -> None:
        """Converts the events to messages in `by_owner`. The end of a sequence goes to the message with its last
        tokens; further token columns of an owner start another message."""
        for started in events.started:
            self._last_batch(started.sequence.owner).started.append(_started(started))
        for owner, parts in _by_owner(events.prompts).items():
            _add_prompts(self._last_batch(owner).prompt_logprobs, parts)
        for owner, vectors in _by_owner(events.pooled).items():
            _add_vectors(self._last_batch(owner).pooled, vectors)
        for columns in events.tokens:
            self._add_tokens(columns)
        for finished in events.finished:
            self._batch_with_tokens_of(finished.sequence).finished.append(_finished(finished))

    def _add_tokens(self, columns: TokenColumns) -> None:
        """Adds the token columns of a step to the batches of their owners; columns of a single owner are not split."""
        owners = columns.owners
        first = int(owners[0])
        if len(owners) == 1 or (owners == first).all():
            _fill(self._batch_without_tokens(first), columns)
            return
        for owner in np.unique(owners).tolist():
            _fill(self._batch_without_tokens(owner), _part(columns, owners == owner, owner))

    def _last_batch(self, owner: int) -> pb.TokenBatch:
        """Returns the last batch of an owner; creates one if there is none."""
        messages = self.by_owner.setdefault(owner, [])
        if not messages:
            messages.append(self._new())
        return messages[-1].tokens

    def _new(self) -> pb.SessionResponse:
        if not self._weight_version:
            return pb.SessionResponse()
        return pb.SessionResponse(tokens=pb.TokenBatch(weight_version=self._weight_version))

    def _batch_with_tokens_of(self, sequence: Sequence) -> pb.TokenBatch:
        """Returns the batch with the last tokens of `sequence`, because the end of the sequence decides whether they
        are text; otherwise the last batch."""
        messages = self.by_owner.get(sequence.owner, ())
        for message in reversed(messages if len(messages) > 1 else ()):
            if sequence.sequence_id in u32(message.tokens.sequence_ids):
                return message.tokens
        return self._last_batch(sequence.owner)

    def _batch_without_tokens(self, owner: int) -> pb.TokenBatch:
        """Returns the owner's last batch if it has no token columns, else a new one after it."""
        batch = self._last_batch(owner)
        if batch.sequence_ids:
            self.by_owner[owner].append(self._new())
            batch = self._last_batch(owner)
        return batch


def _part(columns: TokenColumns, rows: npt.NDArray[np.bool_], owner: int) -> TokenColumns:
    """Returns the columns of one owner: the `rows` (a mask) that belong to it, with their tokens and
    log-probabilities."""
    counts, logprobs, part = columns.token_counts, columns.logprobs, None
    tokens = rows if counts is None else np.repeat(rows, counts)
    if logprobs is not None:
        is_owned = logprobs.owners == owner
        part = LogprobColumns(
            logprobs.owners[is_owned], logprobs.sequence_ids[is_owned], logprobs.entries.select(is_owned)
        )
    return TokenColumns(
        columns.owners[rows],
        columns.sequence_ids[rows],
        columns.token_ids[tokens],
        None if counts is None else counts[rows],
        part,
    )


def _fill(batch: pb.TokenBatch, columns: TokenColumns) -> None:
    """Writes token columns and log-probabilities to an empty batch; positions of one sequence must be adjacent and
    have equally many entries."""
    batch.sequence_ids = columns.sequence_ids.tobytes()
    batch.token_ids = columns.token_ids.tobytes()
    if columns.token_counts is not None:
        batch.token_counts = columns.token_counts.tobytes()
    logprobs = columns.logprobs
    if logprobs is not None and len(logprobs.sequence_ids):
        sequence_ids = logprobs.sequence_ids
        firsts = np.flatnonzero(
            np.append(True, sequence_ids[1:] != sequence_ids[:-1])
        )  # first position of each sequence
        batch.logprobs.sequence_ids = sequence_ids[firsts].tobytes()
        batch.logprobs.entry_counts = logprobs.entries.entry_counts[firsts].tobytes()
        batch.logprobs.token_ids = logprobs.entries.token_ids.tobytes()
        batch.logprobs.logprobs = logprobs.entries.logprobs.tobytes()
        batch.logprobs.ranks = logprobs.entries.ranks.tobytes()


def _by_owner(parts: Iterable[Part]) -> dict[int, list[Part]]:
    """Groups parts by the owner of their sequence, in order."""
    found: defaultdict[int, list[Part]] = defaultdict(list)
    for part in parts:
        found[part.sequence.owner].append(part)
    return found


# Columns are joined before they are assigned to a message, because each read or write of a bytes field copies it.


def _add_prompts(batch: pb.PromptLogprobBatch, parts: list[PromptLogprobsPart]) -> None:
    """Appends log-probabilities of prompt positions to the columns of a batch."""
    entries = [part.entries for part in parts]
    batch.sequence_ids += u32_bytes([part.sequence.sequence_id for part in parts])
    batch.position_counts += u32_bytes([len(part.ranks) for part in entries])
    batch.entry_counts += b"".join(part.entry_counts.tobytes() for part in entries)
    batch.token_ids += b"".join(part.token_ids.tobytes() for part in entries)
    batch.logprobs += b"".join(part.logprobs.tobytes() for part in entries)
    batch.ranks += b"".join(part.ranks.tobytes() for part in entries)


def _add_vectors(batch: pb.PooledBatch, vectors: list[PooledOutput]) -> None:
    batch.sequence_ids += u32_bytes([vector.sequence.sequence_id for vector in vectors])
    batch.sizes += u32_bytes([len(vector.values) // NUMBER_BYTES for vector in vectors])
    batch.values += b"".join(vector.values for vector in vectors)


def _started(started: SequenceStarted) -> pb.StartedSequence:
    """Returns the wire message of a first admission; times in microseconds, cached tokens without the last
    prompt token."""
    sequence = started.sequence
    return pb.StartedSequence(
        sequence_id=sequence.sequence_id,
        num_cached_tokens=min(
            sequence.num_cached_tokens, sequence.num_prompt_tokens - 1
        ),  # the last token is always computed again
        queue_us=max(0, round(started.queued_s * 1e6)),
        encode_us=round(started.encode_s * 1e6),
    )


def _finished(finished: SequenceFinished) -> pb.FinishedSequence:
    """Returns the wire message of a terminal event, with its stop token, score or error where there is one."""
    sequence = finished.sequence
    wire = pb.FinishedSequence(
        sequence_id=sequence.sequence_id,
        reason=REASONS[finished.reason],
        num_preemptions=sequence.num_preemptions,
    )
    if finished.stop_token_id is not None:
        wire.stop_token_id = finished.stop_token_id
    if finished.score is not None:
        wire.score = finished.score
    if finished.failure is not None:
        failure = finished.failure
        code = f"ERROR_CODE_{failure.code}"
        wire.error.CopyFrom(finish_pb2.Error(code=code, message=failure.message, retry_after_ms=failure.retry_after_ms))
    return wire
