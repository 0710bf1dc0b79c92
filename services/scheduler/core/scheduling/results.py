"""What a step that returned means for its sequences: one token each, or several where they drafted (drafts/rows.py)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from services.scheduler.core.beam.beams import FIRST_KEY
from services.scheduler.core.drafts.rows import DraftedRows
from services.scheduler.core.plan import (
    I32,
    LogprobColumns,
    Logprobs,
    PromptLogprobs,
    PromptPart,
    StepResult,
    TokenColumns,
)
from services.scheduler.core.running import Slots
from services.scheduler.core.scheduling.plan_builder import Flight
from services.scheduler.core.sequence import Failure, Reason, Sequence, Status
from shared import block_hash

if TYPE_CHECKING:
    from services.scheduler.core.core import Core


class ResultProcessor:
    """The other half of apply(): tokens, ends, hashes of the blocks that became known."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._running = core.running

    def take_in(self, flight: Flight, result: StepResult) -> None:
        if result.prompts is not None:
            self._take_prompts(flight, result.prompts)
        for slot, failure in result.failures:
            flight = replace(flight, asked=flight.asked & (flight.slots != slot))  # it has no log-probabilities
            self._fail(flight, slot, failure)
        rows = DraftedRows.of(flight, result)
        current = self._running.keys[flight.slots] == flight.keys
        all_current = bool(current.all())
        if all_current and rows is None and not self._core.beams:  # the usual case
            self._take_current(flight.slots, result.token_ids, result.logprobs, flight.asked)
            return
        beams = flight.keys <= FIRST_KEY
        if beams.any():
            rows = rows or DraftedRows.single(flight, result)
            self._core.beams.take(flight.keys[beams], rows.select(beams))
            flight, rows, current = flight.select(~beams), rows.select(~beams), current[~beams]
        if rows is not None:
            self._core.speculation.counts.add(rows)
            self._running.settle(flight.slots[current], rows.refused[current], rows.assumed[current])
        if current.all() and rows is None:
            self._take_current(flight.slots, result.token_ids, result.logprobs, flight.asked)
            return
        rows = rows or DraftedRows.single(flight, result)
        if current.all():
            self._take_rows(flight.slots, rows)
            return
        self._take_rows(flight.slots[current], rows.select(current))
        for row in np.flatnonzero(~current).tolist():
            self._take_late(rows.select(np.arange(len(current)) == row), int(flight.keys[row]))

    def _take_rows(self, slots: Slots, rows: DraftedRows) -> None:
        """Of sequences that still hold the slot they held when the step was planned."""
        if rows.all_single:
            self._take_current(slots, rows.token_ids, rows.logprobs, rows.asked)
        elif len(slots):
            self._take_several(slots, rows)

    def _take_prompts(self, flight: Flight, prompts: PromptLogprobs) -> None:
        """Also of sequences that were preempted meanwhile: they go on behind these positions."""
        parts = prompts.entries.split(prompts.position_counts.tolist())
        for slot, entries in zip(prompts.slots.tolist(), parts, strict=True):
            sequence = self._core.find(flight.prompts[slot])
            if sequence is not None:
                sequence.prompt_logprobs_from += len(entries.ranks)
                self._core.events.prompts.append(PromptPart(sequence, entries))

    def _take_current(self, slots: Slots, tokens: I32, logprobs: Logprobs | None, asked: npt.NDArray[np.bool_]) -> None:
        """One token for each of `slots`."""
        if len(slots) == 0:
            return
        running = self._running
        self.hash(running.append(slots, tokens))
        self._core.counts.generated_tokens += len(slots)
        owners, sequence_ids = running.owners[slots], running.sequence_ids[slots]
        entries = None if logprobs is None else LogprobColumns(owners[asked], sequence_ids[asked], logprobs)
        self._core.events.tokens.append(TokenColumns(owners, sequence_ids, tokens, logprobs=entries))
        self._clear_suspects(slots)
        self._end_finished(slots, tokens)
        if running.num_watched:
            self._end_repeating(slots)

    def _take_several(self, slots: Slots, rows: DraftedRows) -> None:
        """Several tokens for each of `slots`, or none: one after the other, up to the one that ends the sequence."""
        running = self._running
        ends: dict[int, tuple[Reason, int | None]] = {}  # by row
        taken = np.zeros(len(slots), dtype=np.uint32)
        for column, tokens in enumerate(rows.columns()):
            on = np.flatnonzero((rows.counts > column) & (taken == column))
            on = on[[row not in ends for row in on.tolist()]] if ends else on
            self.hash(running.append(slots[on], tokens[on]))
            taken[on] += 1
            self._find_ends(slots, on, tokens, ends)
        kept = rows.cut(taken) if ends else rows
        self._core.counts.generated_tokens += len(kept.token_ids)
        owners, sequence_ids = running.owners[slots], running.sequence_ids[slots]
        if len(kept.token_ids):
            self._core.events.tokens.append(kept.token_columns(owners, sequence_ids))
        self._core.waiting.charge_output(running, np.repeat(slots, np.maximum(taken, 1) - 1))  # one was charged before
        self._clear_suspects(slots[taken > 0])
        for row, (reason, token) in ends.items():
            self._core.end(running.sequence(int(slots[row])), reason, token)

    def _find_ends(self, slots: Slots, rows: Slots, tokens: I32, ends: dict[int, tuple[Reason, int | None]]) -> None:
        """Which of `rows` the last of `tokens` ends: a stop token before the limit, that before repetition."""
        running = self._running
        stopped = running.hits_stop(slots[rows], tokens[rows])
        full = running.num_known[slots[rows]] >= running.limit[slots[rows]]
        for i in np.flatnonzero(stopped | full).tolist():
            row = int(rows[i])
            sequence = running.sequence(int(slots[row]))
            stop = sequence.stop_token_id(int(tokens[row])) if stopped[i] else None
            ends[row] = (Reason.STOP if stopped[i] else Reason.LENGTH), stop
        for row in rows[running.watched[slots[rows]]].tolist():
            if row not in ends and self._repeats(int(slots[row])):
                ends[row] = Reason.REPETITION, None

    def _clear_suspects(self, slots: Slots) -> None:
        """Whoever got a token did not kill the worker."""
        if self._core.suspects:
            self._core.suspects.difference_update(slots.tolist())

    def _end_repeating(self, slots: Slots) -> None:
        """After the stop rules, which win."""
        running = self._running
        for slot in slots[running.watched[slots] & running.live[slots]].tolist():
            if self._repeats(slot):
                self._core.end(running.sequence(slot), Reason.REPETITION)

    def _repeats(self, slot: int) -> bool:
        running = self._running
        sequence = running.sequence(slot)
        rule = sequence.repetition
        assert rule is not None
        num_output_tokens = int(running.num_known[slot]) - sequence.num_prompt_tokens
        return num_output_tokens >= sequence.min_output_tokens and rule.repeats(running.last_output(slot, rule.window))

    def _end_finished(self, slots: Slots, tokens: I32) -> None:
        running = self._running
        stopped = running.hits_stop(slots, tokens)
        full = running.num_known[slots] >= running.limit[slots]
        for i in (stopped | full).nonzero()[0].tolist():
            self._end(running.sequence(int(slots[i])), int(tokens[i]), bool(stopped[i]))

    def _end(self, sequence: Sequence, token: int, stopped: bool) -> None:
        if stopped:
            self._core.end(sequence, Reason.STOP, sequence.stop_token_id(token))
        else:
            self._core.end(sequence, Reason.LENGTH)

    def hash(self, filled: Slots) -> None:
        """Continues the hash chain of each slot whose last block is now known."""
        for slot in filled.tolist():
            self._extend_chain(self._running.sequence(slot), self._running.take_block(slot))

    def _extend_chain(self, sequence: Sequence, block: bytes) -> None:
        if self._core.limits.enable_prefix_caching:
            parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.root_hash
            sequence.block_hashes.append(block_hash.block_hash(parent, block))

    def _take_late(self, rows: DraftedRows, key: int) -> None:
        """Tokens of a sequence that lost its slot meanwhile: kept if preempted, dropped if ended."""
        sequence = self._core.find(key)
        if sequence is None or sequence.status is not Status.PREEMPTED:
            return
        taken, stopped = 0, False
        for token in rows.token_ids.tolist():
            self._append_late(sequence, token)
            taken += 1
            stopped = token in sequence.stop_token_ids or token in sequence.eos_token_ids
            if stopped or sequence.num_tokens >= sequence.max_total_tokens:
                break
        if not taken:
            return
        self._core.counts.generated_tokens += taken
        owners, sequence_ids = (
            np.array([sequence.owner], dtype=np.int32),
            np.array([sequence.sequence_id], dtype=np.uint32),
        )
        kept = rows.cut(np.array([taken], dtype=np.uint32))
        self._core.events.tokens.append(kept.token_columns(owners, sequence_ids))
        if stopped or sequence.num_tokens >= sequence.max_total_tokens:
            self._end(sequence, sequence.last_token, stopped)

    def _append_late(self, sequence: Sequence, token: int) -> None:
        sequence.append(token)
        size = self._core.limits.block_size * block_hash.TOKEN_BYTES
        if len(sequence.tokens) % size == 0:
            self._extend_chain(sequence, bytes(sequence.tokens[-size:]))

    def _fail(self, flight: Flight, slot: int, failure: Failure) -> None:
        """The worker gave up on a slot; whatever token it reported for it is dropped with the sequence."""
        for key in flight.keys[flight.slots == slot].tolist():
            sequence = self._core.beams.root_of(key) or self._core.find(key)
            if sequence is not None:
                self._core.end(sequence, Reason.ERROR, failure=failure)
