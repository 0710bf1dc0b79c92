"""What a step that returned means for its sequences."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.scheduler.core.plan import I32, LogprobColumns, Logprobs, StepResult, TokenColumns
from services.scheduler.core.running import Slots
from services.scheduler.core.sequence import Failure, Reason, Sequence, Status
from services.scheduler.core.step import Flight
from shared import block_hash

if TYPE_CHECKING:
    from services.scheduler.core.core import Core


class Outcome:
    """The other half of apply(): tokens, ends, hashes of the blocks that became known."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._running = core.running

    def take_in(self, flight: Flight, result: StepResult) -> None:
        assert len(result.token_ids) == len(flight.slots), "one token for each slot that sampled"
        for slot, failure in result.failures:
            self._fail(flight, slot, failure)
        current = self._running.keys[flight.slots] == flight.keys
        if current.all():
            self._take_current(flight.slots, result.token_ids, result.logprobs, flight.asked)
            return
        logprobs = None if result.logprobs is None else result.logprobs.select(current[flight.asked])
        self._take_current(flight.slots[current], result.token_ids[current], logprobs, flight.asked[current])
        for row in np.flatnonzero(~current).tolist():
            self._take_late(flight, result, row)

    def _take_current(self, slots: Slots, tokens: I32, logprobs: Logprobs | None, asked: npt.NDArray[np.bool_]) -> None:
        """Tokens of sequences that still hold the slot they held when the step was planned."""
        if len(slots) == 0:
            return
        running = self._running
        self._hash(running.append(slots, tokens))
        self._core.counts.generated_tokens += len(slots)
        owners, streams = running.owners[slots], running.streams[slots]
        entries = None if logprobs is None else LogprobColumns(owners[asked], streams[asked], logprobs)
        self._core.events.tokens.append(TokenColumns(owners, streams, tokens, entries))
        self._clear_suspects(slots)
        self._end_finished(slots, tokens)
        if running.watched.any():
            self._end_repeating(slots)

    def _clear_suspects(self, slots: Slots) -> None:
        """Whoever got a token did not kill the worker."""
        if self._core.suspects:
            self._core.suspects.difference_update(slots.tolist())

    def _end_repeating(self, slots: Slots) -> None:
        """After the stop rules, which win."""
        running = self._running
        for slot in slots[running.watched[slots] & running.live[slots]].tolist():
            sequence = running.sequence(slot)
            rule = sequence.repetition
            assert rule is not None
            num_output_tokens = int(running.num_known[slot]) - sequence.num_prompt_tokens
            if num_output_tokens >= sequence.min_output_tokens and rule.repeats(running.last_output(slot, rule.window)):
                self._core.end(sequence, Reason.REPETITION)

    def _end_finished(self, slots: Slots, tokens: I32) -> None:
        running = self._running
        stopped = running.hits_stop(slots, tokens)
        full = running.num_known[slots] >= running.limit[slots]
        for i in np.flatnonzero(stopped | full).tolist():
            self._end(running.sequence(int(slots[i])), int(tokens[i]), bool(stopped[i]))

    def _end(self, sequence: Sequence, token: int, stopped: bool) -> None:
        if stopped:
            self._core.end(sequence, Reason.STOP, sequence.stop_token_id(token))
        else:
            self._core.end(sequence, Reason.LENGTH)

    def _hash(self, filled: Slots) -> None:
        """Continues the hash chain of each slot whose last block is now known."""
        for slot in filled.tolist():
            self._extend_chain(self._running.sequence(slot), self._running.take_block(slot))

    def _extend_chain(self, sequence: Sequence, block: bytes) -> None:
        if self._core.limits.enable_prefix_caching:
            parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.root_hash
            sequence.block_hashes.append(block_hash.block_hash(parent, block))

    def _take_late(self, flight: Flight, result: StepResult, row: int) -> None:
        """A token of a sequence that lost its slot meanwhile: kept if preempted, dropped if ended."""
        sequence = self._core.find(int(flight.keys[row]))
        if sequence is None or sequence.status is not Status.PREEMPTED:
            return
        token = int(result.token_ids[row])
        sequence.append(token)
        size = self._core.limits.block_size * block_hash.TOKEN_BYTES
        if len(sequence.tokens) % size == 0:
            self._extend_chain(sequence, bytes(sequence.tokens[-size:]))
        self._core.counts.generated_tokens += 1
        self._core.events.tokens.append(self._late_columns(sequence, token, flight, result.logprobs, row))
        stopped = token in sequence.stop_token_ids or token in sequence.eos_token_ids
        if stopped or sequence.num_tokens >= sequence.max_total_tokens:
            self._end(sequence, token, stopped)

    def _late_columns(
        self, sequence: Sequence, token: int, flight: Flight, logprobs: Logprobs | None, row: int
    ) -> TokenColumns:
        owners = np.array([sequence.owner], dtype=np.int32)
        streams = np.array([sequence.stream], dtype=np.uint32)
        entries = None
        if logprobs is not None and flight.asked[row]:
            position = np.flatnonzero(flight.asked) == row
            entries = LogprobColumns(owners, streams, logprobs.select(position))
        return TokenColumns(owners, streams, np.array([token], dtype=np.int32), entries)

    def _fail(self, flight: Flight, slot: int, failure: Failure) -> None:
        """The worker gave up on a slot; whatever token it reported for it is dropped with the sequence."""
        for key in flight.keys[flight.slots == slot].tolist():
            sequence = self._core.find(key)
            if sequence is not None:
                self._core.end(sequence, Reason.ERROR, failure=failure)
