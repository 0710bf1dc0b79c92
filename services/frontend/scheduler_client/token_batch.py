"""What one step gave, taken apart and handed to the sequences. The hot path: runs once per step, for all of them."""

from __future__ import annotations

from collections.abc import Iterator

from services.frontend.delta import Finish, TokenLogprobs
from services.frontend.scheduler_client.sequence import End, Sequence
from shared.columns import f32, i32, u32
from shared.errors import DeadlineExceeded, Internal, QuireError, from_proto
from shared.pb.common.v1 import finish_pb2
from shared.pb.scheduler.v1 import scheduler_pb2 as pb

NO_LOGPROBS: list[TokenLogprobs] = []


Refused = list[tuple[Sequence, QuireError]]


def deliver(batch: pb.TokenBatch, live: dict[int, Sequence], now: float) -> tuple[list[Sequence], Refused]:
    """Takes what ended out of `live`. Returns those that matched a stop string, and those ended with an error."""
    for started in batch.started:
        if (sequence := live.get(started.sequence_id)) is not None:
            sequence.start(started.num_cached_tokens, started.queue_us)
    ends = {finished.sequence_id: _end(finished) for finished in batch.finished}
    stopped = _deliver_tokens(batch, live, ends, now)
    refused: Refused = []
    for sequence_id, end in ends.items():
        if (sequence := live.pop(sequence_id, None)) is None:
            continue
        if end.error is not None:
            refused.append((sequence, end.error))
        else:
            sequence.sink.on_end(end, now)
    return stopped, refused


def _deliver_tokens(
    batch: pb.TokenBatch, live: dict[int, Sequence], ends: dict[int, End], now: float
) -> list[Sequence]:
    """Takes out of `ends` those that end with a token."""
    ids = u32(batch.sequence_ids).tolist()
    tokens = list(_split(i32(batch.token_ids).tolist(), u32(batch.token_counts).tolist()))
    logprobs = _logprobs(batch.logprobs, dict(zip(ids, tokens, strict=True))) if batch.HasField("logprobs") else {}
    stopped = []
    for sequence_id, new in zip(ids, tokens, strict=True):
        sequence = live.get(sequence_id)
        if sequence is None:  # cancelled meanwhile
            continue
        end = None
        if sequence_id in ends and ends[sequence_id].error is None:
            end = ends.pop(sequence_id)
        sequence.tokens.extend(new)
        enough = sequence.sink.on_tokens(new, logprobs.get(sequence_id, NO_LOGPROBS), end, now)
        if end is not None or enough:
            del live[sequence_id]
        if enough and end is None:
            stopped.append(sequence)
    return stopped


def _split(tokens: list[int], counts: list[int]) -> Iterator[list[int]]:
    if not counts:
        yield from ([token] for token in tokens)
        return
    start = 0
    for count in counts:
        yield tokens[start : start + count]
        start += count


def _end(finished: pb.FinishedSequence) -> End:
    stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
    return End(Finish(finished.reason, stop_token_id), _error(finished))


def _error(finished: pb.FinishedSequence) -> QuireError | None:
    if finished.reason not in (finish_pb2.FINISH_REASON_ERROR, finish_pb2.FINISH_REASON_DEADLINE):
        return None
    if finished.HasField("error"):
        return from_proto(finished.error)
    return (
        DeadlineExceeded("the deadline passed")
        if finished.reason == finish_pb2.FINISH_REASON_DEADLINE
        else Internal("failed")
    )


def _logprobs(batch: pb.LogprobBatch, tokens: dict[int, list[int]]) -> dict[int, list[TokenLogprobs]]:
    """By sequence, one for each of its new tokens."""
    entries = zip(i32(batch.token_ids).tolist(), f32(batch.logprobs).tolist(), strict=True)
    ranks = iter(u32(batch.ranks).tolist())
    found: dict[int, list[TokenLogprobs]] = {}
    for sequence_id, count in zip(u32(batch.sequence_ids).tolist(), u32(batch.entry_counts).tolist(), strict=True):
        rows = ([next(entries) for _ in range(count)] for _ in tokens[sequence_id])
        found[sequence_id] = [TokenLogprobs(*row[0], next(ranks), row[1:]) for row in rows]
    return found
