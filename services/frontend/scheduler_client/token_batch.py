"""Unpacks step results and delivers them to the sequences. Hot path: runs once per step for all sequences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.services.frontend.scheduler_client.sequence import Sequence, SequenceEnd
from quire.shared.columns import F32, I32, NUMBER_BYTES, U32, f32, i32, u32
from quire.shared.errors import DeadlineExceeded, Internal, QuireError, from_proto
from quire.shared.logs import logger
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

log = logger("scheduler_client")

INITIAL_WEIGHT_VERSION = "0"  # before the first weights update
ENTRIES_IN_A_TURN = 4096  # candidates of prompt positions that are unpacked in a millisecond
NO_LOGPROBS: list[TokenLogprobs] = []


@dataclass(slots=True)
class DeliveryOutcome:
    """Sequences of a step that the session must act on."""

    stopped: list[Sequence] = field(default_factory=list)  # a stop string matched
    broken: list[Sequence] = field(default_factory=list)  # delivery to the sink failed
    resumed: list[Sequence] = field(default_factory=list)  # got their first token after a move
    refused: list[tuple[Sequence, QuireError]] = field(default_factory=list)  # ended with an error by the scheduler

    def mark_broken(self, sequence: Sequence, live: dict[int, Sequence]) -> None:
        """Removes a sequence whose sink raised; called inside an exception handler. Other sequences are not
        affected."""
        log.exception("cannot deliver tokens to a stream", request=sequence.prompt_request.request_id)
        self.broken.append(sequence)
        live.pop(sequence.id, None)


def deliver(
    batch: pb.TokenBatch, live: dict[int, Sequence], now: float, prompts: DeliveryOutcome | None = None
) -> DeliveryOutcome:
    """Delivers a step's starts, tokens, log-probabilities, vectors and ends to the sinks, and removes ended sequences
    from `live`. Returns the sequences that need further action; ids that are not in `live` are skipped. `prompts`:
    outcome of the prompts' log-probabilities, if prompt_portions() has delivered them before."""
    delivery = prompts or DeliveryOutcome()
    for started in batch.started:
        if (sequence := live.get(started.sequence_id)) is not None:
            try:
                sequence.record_start(started.num_cached_tokens, started.queue_us, started.encode_us)
            except Exception:
                delivery.mark_broken(sequence, live)
    if prompts is None and batch.HasField("prompt_logprobs"):
        for _ in prompt_portions(batch.prompt_logprobs, live, delivery):
            pass
    if batch.HasField("pooled"):
        _deliver_vectors(batch.pooled, live, delivery)
    ends = {finished.sequence_id: _end(finished) for finished in batch.finished}
    _deliver_tokens(batch, live, ends, now, delivery)
    _deliver_ends(batch, live, ends, now, delivery)
    return delivery


def _deliver_ends(
    batch: pb.TokenBatch, live: dict[int, Sequence], ends: dict[int, SequenceEnd], now: float, delivery: DeliveryOutcome
) -> None:
    """Ends the sequences that finished without a token in this step; one with an error is put in `refused` instead of
    being ended."""
    for sequence_id, end in ends.items():
        if (sequence := live.get(sequence_id)) is None:
            continue
        if end.error is not None:
            delivery.refused.append((sequence, end.error))
            del live[sequence_id]
            continue
        try:
            if sequence.tokens:
                sequence.sink.weight_version = batch.weight_version or INITIAL_WEIGHT_VERSION
            sequence.sink.on_end(end, now)
            del live[sequence_id]
        except Exception:
            delivery.mark_broken(sequence, live)


def _deliver_tokens(
    batch: pb.TokenBatch, live: dict[int, Sequence], ends: dict[int, SequenceEnd], now: float, delivery: DeliveryOutcome
) -> None:
    """Delivers new tokens, and removes from `ends` the sequences that end with one."""
    ids = u32(batch.sequence_ids).tolist()
    tokens = _split(i32(batch.token_ids).tolist(), u32(batch.token_counts).tolist())
    pairs = list(zip(ids, tokens, strict=True))  # validates the columns before anything is delivered
    logprobs = _logprobs(batch.logprobs, dict(pairs)) if batch.HasField("logprobs") else {}
    for sequence_id, new in pairs:
        sequence = live.get(sequence_id)
        if sequence is None:  # cancelled
            continue
        end = None
        if sequence_id in ends and ends[sequence_id].error is None:
            end = ends.pop(sequence_id)
        sequence.tokens.extend(new)
        if sequence.migrating_since_s is not None:
            delivery.resumed.append(sequence)
        try:
            is_enough = sequence.sink.on_tokens(new, logprobs.get(sequence_id, NO_LOGPROBS), end, now)
        except Exception:
            delivery.mark_broken(sequence, live)
            continue
        if end is not None or is_enough:
            sequence.sink.weight_version = batch.weight_version or INITIAL_WEIGHT_VERSION
            del live[sequence_id]
        if is_enough and end is None:
            delivery.stopped.append(sequence)


def _split(tokens: list[int], counts: list[int]) -> list[list[int]]:
    """Splits a step's tokens by sequence; without counts each sequence has one. Raises ValueError if the counts do not
    add up."""
    if not counts:
        return [[token] for token in tokens]
    if sum(counts) != len(tokens):
        raise ValueError(f"token_counts add up to {sum(counts)} for {len(tokens)} tokens")
    rest = iter(tokens)
    return [list(islice(rest, count)) for count in counts]


def _end(finished: pb.FinishedSequence) -> SequenceEnd:
    """Returns the end that the scheduler reports, with its error, if any."""
    stop_token_id = finished.stop_token_id if finished.HasField("stop_token_id") else None
    score = finished.score if finished.HasField("score") else None
    finish = Finish(finished.reason, stop_token_id, score=score)
    return SequenceEnd(finish, _error(finished), finished.num_preemptions)


def error_end(error: QuireError) -> SequenceEnd:
    """Returns the end of a sequence that failed with `error`."""
    return SequenceEnd(Finish(finish_pb2.FINISH_REASON_ERROR), error)


def _error(finished: pb.FinishedSequence) -> QuireError | None:
    """Returns the error of a sequence that failed or passed its deadline; None for other ends."""
    if finished.reason not in (finish_pb2.FINISH_REASON_ERROR, finish_pb2.FINISH_REASON_DEADLINE):
        return None
    if finished.HasField("error"):
        return from_proto(finished.error)
    return (
        DeadlineExceeded("the deadline passed")
        if finished.reason == finish_pb2.FINISH_REASON_DEADLINE
        else Internal("failed")
    )


def prompt_portions(
    batch: pb.PromptLogprobBatch, live: dict[int, Sequence], delivery: DeliveryOutcome
) -> Iterator[None]:
    """Delivers log-probabilities of prompt positions and counts them per sequence, so that a resubmission does not ask
    for them again. Yields after each portion of at least ENTRIES_IN_A_TURN candidates, if more follow."""
    candidates = u32(batch.entry_counts)
    ends = np.concatenate(([0], np.cumsum(candidates, dtype=np.int64)))  # of the candidates, by position
    columns = (i32(batch.token_ids), f32(batch.logprobs), u32(batch.ranks))
    if not len(columns[0]) == len(columns[1]) == ends[-1] or len(columns[2]) != len(candidates):
        raise ValueError("the columns of prompt log-probabilities differ in length")
    counts = u32(batch.position_counts).tolist()
    if sum(counts) != len(candidates):
        raise ValueError(f"position_counts add up to {sum(counts)} for {len(candidates)} positions")
    at = num_entries = 0
    for sequence_id, count in zip(u32(batch.sequence_ids).tolist(), counts, strict=True):
        last = at + count
        while at < last:
            portion = min(last, int(np.searchsorted(ends, ends[at] + ENTRIES_IN_A_TURN, "left")))
            if num_entries >= ENTRIES_IN_A_TURN:
                yield
                num_entries = 0
            _deliver_prompt(sequence_id, _entries(columns, candidates, ends, at, portion), live, delivery)
            num_entries += int(ends[portion] - ends[at])
            at = portion


def _deliver_prompt(
    sequence_id: int, new: list[TokenLogprobs], live: dict[int, Sequence], delivery: DeliveryOutcome
) -> None:
    """Delivers log-probabilities of consecutive positions of one prompt, unless it was cancelled."""
    sequence = live.get(sequence_id)
    if sequence is None:
        return
    sequence.num_prompt_logprobs += len(new)
    try:
        sequence.sink.on_prompt_logprobs(new)
    except Exception:
        delivery.mark_broken(sequence, live)


def _entries(columns: tuple[I32, F32, U32], candidates: U32, ends: Any, begin: int, end: int) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the positions [begin, end). `ends`: end of each position's candidates, from
    index 1 on."""
    token_ids, logprobs, ranks = columns
    entries = slice(ends[begin], ends[end])
    pairs = zip(token_ids[entries].tolist(), logprobs[entries].tolist(), strict=True)
    return list(_joined(pairs, candidates[begin:end].tolist(), ranks[begin:end].tolist()))


def _deliver_vectors(batch: pb.PooledBatch, live: dict[int, Sequence], delivery: DeliveryOutcome) -> None:
    """Delivers pooling results: the f32 values of all sequences stand one after another in a single column."""
    columns, at = batch.values, 0  # protobuf copies the bytes at each access
    for sequence_id, size in zip(u32(batch.sequence_ids).tolist(), u32(batch.sizes).tolist(), strict=True):
        values = columns[at : at + size * NUMBER_BYTES]
        at += size * NUMBER_BYTES
        sequence = live.get(sequence_id)
        if sequence is None:
            continue
        try:
            sequence.sink.on_vector(values)
        except Exception:
            delivery.mark_broken(sequence, live)


def _logprobs(batch: pb.LogprobBatch, tokens: dict[int, list[int]]) -> dict[int, list[TokenLogprobs]]:
    """Returns log-probabilities by sequence id, one entry per new token. `tokens`: new tokens by sequence id."""
    ids, counts = u32(batch.sequence_ids).tolist(), u32(batch.entry_counts).tolist()
    per_position = [
        count for sequence_id, count in zip(ids, counts, strict=True) for _ in range(len(tokens[sequence_id]))
    ]
    positions = _positions(batch, per_position)
    return {sequence_id: list(islice(positions, len(tokens[sequence_id]))) for sequence_id in ids}


def _positions(batch: pb.LogprobBatch, counts: Iterable[int]) -> Iterator[TokenLogprobs]:
    """Yields one entry per position; `counts`: candidates per position, the sampled token first."""
    pairs = zip(i32(batch.token_ids).tolist(), f32(batch.logprobs).tolist(), strict=True)
    return _joined(pairs, counts, u32(batch.ranks).tolist())


def _joined(pairs: Iterator[tuple[int, float]], counts: Iterable[int], ranks: Iterable[int]) -> Iterator[TokenLogprobs]:
    """Yields one entry per position from the pairs of token and log-probability of all candidates."""
    for count, rank in zip(counts, ranks, strict=True):
        sampled, *others = islice(pairs, count)
        yield TokenLogprobs(*sampled, rank, others)
