"""Validates a worker's step result: counts, lengths, tokens of the vocabulary, progress.

An invalid result ends the attachment with an error that names the column. Later code relies on the shapes.
"""

from __future__ import annotations

import numpy as np

from quire.services.scheduler.core.step.plan_builder import InFlightStep
from quire.shared.columns import U32, u32
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.worker_limits import MAX_POOLED_ELEMENTS

WIDTH = 4  # bytes per element of every column
MAX_STEPS_WITHOUT_TOKEN = (
    1000  # consecutive steps without a token of a slot that samples: far beyond any wait for blocks
)


class ResultChecks:
    """Checks of one attachment, from the sizes in the worker's hello."""

    def __init__(self, hello: pb.WorkerHello) -> None:
        self._vocab_size = hello.model.vocab_size
        self._most_drafts = hello.drafting.num_speculative_tokens
        self._num_empty = np.zeros(
            hello.limits.max_num_seqs, dtype=np.int64
        )  # [max_num_seqs] consecutive steps without a token
        self._some_empty = False

    def check(self, wire: pb.StepResult, flight: InFlightStep) -> None:
        """Raises FailedPrecondition if `wire` cannot be the result of `flight`."""
        num_slots = len(flight.slots)
        counts = self._counts(wire, flight) if wire.token_counts else None
        tokens = _column(wire.token_ids, "token_ids", num_slots if counts is None else int(counts.sum()), flight)
        if wire.failures:
            self._check_failures(wire, flight, counts, tokens)
        else:
            self._check_vocabulary(tokens, "token_ids", flight)
        if wire.draft_counts:
            self._check_drafts(_column(wire.draft_counts, "draft_counts", num_slots, flight), flight)
        if wire.HasField("logprobs"):
            self._check_logprobs(wire.logprobs, "logprobs", flight)
        if wire.HasField("prompt_logprobs"):
            self._check_prompts(wire.prompt_logprobs, flight)
        if flight.pooled_keys or wire.HasField("pooled"):
            self._check_pooled(wire, flight)
        if counts is not None or self._some_empty:
            self._check_progress(counts, flight)

    def _counts(self, wire: pb.StepResult, flight: InFlightStep) -> U32:
        """Returns the number of tokens of each slot. Raises FailedPrecondition if a slot has more than its drafts
        allow, or none although the worker does not draft."""
        counts = _column(wire.token_counts, "token_counts", len(flight.slots), flight)
        most = 1 if flight.drafts is None else 1 + flight.drafts
        if not self._most_drafts and not counts.all():
            raise _wrong(flight, f"token_counts: a worker that does not draft gives a token to each slot, not {counts}")
        if (counts > most).any():
            raise _wrong(flight, f"token_counts: at most {most} tokens of each slot, the worker sent {counts}")
        return counts

    def _check_progress(self, counts: U32 | None, flight: InFlightStep) -> None:
        """Rejects a slot without a token in too many consecutive steps; single steps without one are valid."""
        if counts is None or not len(flight.slots):
            self._num_empty[flight.slots] = 0
        else:
            self._num_empty[flight.slots] = np.where(counts == 0, self._num_empty[flight.slots] + 1, 0)
        most = int(self._num_empty.max(initial=0))
        self._some_empty = most > 0
        if most >= MAX_STEPS_WITHOUT_TOKEN:
            slot = int(self._num_empty.argmax())
            raise _wrong(flight, f"token_counts: slot {slot} has got no token in {most} steps that sample it")

    def _check_failures(self, wire: pb.StepResult, flight: InFlightStep, counts: U32 | None, tokens: U32) -> None:
        """Checks that failed slots sample or end in this step, and the tokens of the others: tokens of failed slots
        have no meaning. Raises FailedPrecondition."""
        failed = np.array([failure.slot for failure in wire.failures], dtype=np.int64)
        if not np.isin(failed, [*flight.slots.tolist(), *flight.pooled_keys]).all():
            raise _wrong(flight, f"failures: slots {failed.tolist()} do not all sample or end")
        succeeded = ~np.isin(flight.slots, failed)
        rows = succeeded if counts is None else np.repeat(succeeded, counts)
        self._check_vocabulary(tokens[rows], "token_ids", flight)

    def _check_vocabulary(self, tokens: U32, name: str, flight: InFlightStep) -> None:
        """Rejects token ids outside the vocabulary, compared as unsigned numbers: a negative id is a large one."""
        if len(tokens) and int(tokens.max()) >= self._vocab_size:
            wrong = int(tokens[tokens >= self._vocab_size][0].astype(np.int32))
            raise _wrong(flight, f"{name}: {wrong} is not in the vocabulary of {self._vocab_size} tokens")

    def _check_drafts(self, verified: U32, flight: InFlightStep) -> None:
        if (verified > self._most_drafts).any():
            raise _wrong(flight, f"draft_counts: the worker drafts {self._most_drafts} at most, and sent {verified}")

    def _check_prompts(self, wire: pb.PromptLogprobColumns, flight: InFlightStep) -> None:
        """Checks that prompt log-probabilities are of slots that asked for them, each once, and that the columns
        have matching lengths. Raises FailedPrecondition."""
        slots = _whole(wire.slots, "prompt_logprobs.slots", flight)
        if len(np.unique(slots)) != len(slots) or not set(slots.tolist()) <= flight.prompt_logprob_keys.keys():
            raise _wrong(flight, f"prompt_logprobs: no prompts that ask are computed in slots {slots}")
        counts = _column(wire.position_counts, "prompt_logprobs.position_counts", len(slots), flight)
        num_positions = self._check_logprobs(wire.entries, "prompt_logprobs.entries", flight)
        if int(counts.sum()) != num_positions:
            raise _wrong(flight, f"prompt_logprobs: {counts.sum()} positions, entries of {num_positions}")

    def _check_pooled(self, wire: pb.StepResult, flight: InFlightStep) -> None:
        """Checks that there is a vector for each slot that ends without a sample, unless it failed: one number for a
        document, none for a query."""
        pooled = wire.pooled
        slots = _whole(pooled.slots, "pooled.slots", flight).tolist()
        failed = {failure.slot for failure in wire.failures}
        pooling_slots = flight.pooled_keys.keys() - {slot for slot, is_query in flight.late_queries.items() if is_query}
        due = pooling_slots - failed
        if len(set(slots)) != len(slots) or not due <= set(slots) <= pooling_slots:
            raise _wrong(flight, f"pooled: vectors of slots {sorted(due)} are due, the worker sent those of {slots}")
        sizes = _column(pooled.sizes, "pooled.sizes", len(slots), flight)
        if len(sizes) and (not sizes.all() or int(sizes.max()) > MAX_POOLED_ELEMENTS):
            raise _wrong(flight, f"pooled.sizes: 1 to {MAX_POOLED_ELEMENTS} elements of each, the worker sent {sizes}")
        for slot, size in zip(slots, sizes.tolist(), strict=True):
            if slot in flight.late_queries and size != 1:
                raise _wrong(flight, f"pooled.sizes: 1 element of the document in slot {slot}, the worker sent {size}")
        _column(pooled.values, "pooled.values", int(sizes.sum()), flight)

    def _check_logprobs(self, wire: pb.LogprobColumns, name: str, flight: InFlightStep) -> int:
        """Checks that log-probability columns have matching lengths and known tokens; returns the number of
        positions. `name`: of the columns, for the error. Raises FailedPrecondition."""
        counts = _whole(wire.entry_counts, f"{name}.entry_counts", flight)
        num_entries = int(counts.sum())
        self._check_vocabulary(_column(wire.token_ids, f"{name}.token_ids", num_entries, flight), name, flight)
        _column(wire.logprobs, f"{name}.logprobs", num_entries, flight)
        _column(wire.ranks, f"{name}.ranks", len(counts), flight)
        return len(counts)


def _whole(column: bytes, name: str, flight: InFlightStep) -> U32:
    if len(column) % WIDTH:
        raise _wrong(flight, f"{name}: {len(column)} bytes are no column")
    return u32(column)


def _column(column: bytes, name: str, count: int, flight: InFlightStep) -> U32:
    if len(column) != WIDTH * count:
        raise _wrong(flight, f"{name}: {count} are due, the worker sent {len(column)} bytes")
    return u32(column)


def _wrong(flight: InFlightStep, what: str) -> FailedPrecondition:
    return FailedPrecondition(f"step {flight.step_id}: {what}")
