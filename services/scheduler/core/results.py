"""Applies step results: one token for each sequence, or several with speculative decoding (drafts/rows.py)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.beam.beams import FIRST_BEAM_KEY, BeamScheduler
from quire.services.scheduler.core.drafts.counts import DraftCounts
from quire.services.scheduler.core.drafts.rows import DraftedRows
from quire.services.scheduler.core.plan import (
    I32,
    LogprobColumns,
    Logprobs,
    PooledOutput,
    PromptLogprobs,
    PromptLogprobsPart,
    StepResult,
    TokenColumns,
)
from quire.services.scheduler.core.running.running import Slots
from quire.services.scheduler.core.sequences.ending import Ending, Failure, Reason, ending_of
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.core.state import CoreState
from quire.services.scheduler.core.step.plan_builder import InFlightStep


class ResultProcessor:
    """Applies tokens, endings and block hashes of a step's result."""

    def __init__(self, state: CoreState, beams: BeamScheduler, drafts: DraftCounts) -> None:
        self._state = state
        self._tables, self._running = state.tables, state.running
        self._beams = beams
        self._drafts = drafts

    def apply(self, flight: InFlightStep, result: StepResult) -> None:
        """Applies the result of a step to the sequences that it was planned for; `flight` records them.

        The rows of `flight` and of `result` are the step's sampling slots, ascending: one token for each, or
        `token_counts` tokens with speculative decoding, int32. A slot may hold another sequence by now: `flight.keys`
        names the sequences that the tokens belong to, and tokens of sequences that have ended are dropped. Lengths have
        been checked (replicas/result_checks.py).
        """
        if result.prompts is not None:
            self._apply_prompts(flight, result.prompts)
        if result.failures:
            flight = self._apply_failures(flight, result.failures)
        if flight.pooled_keys:
            self._apply_pooled(flight.pooled_keys, result.pooled)
        all_single = flight.drafts is None and result.token_counts is None
        assert not all_single or len(result.token_ids) == len(flight.slots), "one token for each slot that sampled"
        rows = None if all_single else DraftedRows.from_result(flight, result)
        current = self._running.keys[flight.slots] == flight.keys
        all_current = np.count_nonzero(current) == len(current)
        if all_current and rows is None and not self._state.searches.by_root:  # the common case
            self._apply_current(flight.slots, result.token_ids, result.logprobs, flight.asks_logprobs)
            return
        beams = flight.keys <= FIRST_BEAM_KEY
        if beams.any():
            rows = rows or DraftedRows.from_result(flight, result)
            self._beams.apply(flight.keys[beams], rows.select(beams))
            flight, rows, current = flight.select(~beams), rows.select(~beams), current[~beams]
        if rows is not None:
            self._drafts.add(rows)
            self._running.resolve_drafts(flight.slots[current], rows.num_rejected[current], rows.assumed[current])
        if current.all() and rows is None:
            self._apply_current(flight.slots, result.token_ids, result.logprobs, flight.asks_logprobs)
            return
        rows = rows or DraftedRows.from_result(flight, result)
        if current.all():
            self._apply_rows(flight.slots, rows)
            return
        self._apply_rows(flight.slots[current], rows.select(current))
        for row in np.flatnonzero(~current).tolist():
            self._apply_late(rows.select(np.arange(len(current)) == row), int(flight.keys[row]))

    def _apply_rows(self, slots: Slots, rows: DraftedRows) -> None:
        """Applies rows of sequences that still hold the slot that they held when the step was planned."""
        if rows.all_single:
            self._apply_current(slots, rows.token_ids, rows.logprobs, rows.asks_logprobs)
        elif len(slots):
            self._apply_several(slots, rows)

    def _apply_failures(self, flight: InFlightStep, failures: list[tuple[int, Failure]]) -> InFlightStep:
        """Fails sequences, queries first, because their documents fail with them. Returns the rest of the step."""
        for slot, failure in sorted(failures, key=lambda failed: not flight.late_queries.get(failed[0], False)):
            flight = replace(
                flight, asks_logprobs=flight.asks_logprobs & (flight.slots != slot)
            )  # a failed slot has no log-probabilities
            self._fail(flight, slot, failure)
        return flight

    def _apply_prompts(self, flight: InFlightStep, prompts: PromptLogprobs) -> None:
        """Emits log-probabilities of prompts and counts their positions as delivered, also for sequences that were
        preempted meanwhile."""
        parts = prompts.entries.split(prompts.position_counts.tolist())
        for slot, entries in zip(prompts.slots.tolist(), parts, strict=True):
            sequence = self._state.sequences.get(flight.prompt_logprob_keys[slot])
            if sequence is not None:
                sequence.prompt_logprobs_from += len(entries.ranks)
                self._state.events.prompts.append(PromptLogprobsPart(sequence, entries))

    def _apply_pooled(self, ended: Mapping[int, int], pooled: Mapping[int, bytes]) -> None:
        """Finishes the sequences that ended without a sample, including those that were preempted meanwhile: emits
        their vectors, or, for a late-interaction query, applies it as an internal sequence. `ended`: keys by slot;
        `pooled`: f32 columns by slot."""
        for slot, key in ended.items():
            sequence = self._state.sequences.get(key)
            if sequence is not None and sequence.is_query:
                self._state.finish_internal(sequence)
            elif sequence is not None:
                self._state.events.pooled.append(PooledOutput(sequence, pooled[slot]))
                self._state.finish(sequence, Reason.STOP)

    def _apply_current(
        self, slots: Slots, tokens: I32, logprobs: Logprobs | None, asks_logprobs: npt.NDArray[np.bool_]
    ) -> None:
        """Appends one token to each of `slots`, emits the tokens with their log-probabilities, and finishes the
        sequences that they end. `asks_logprobs`: mask of the slots that `logprobs` has entries for."""
        if len(slots) == 0:
            return
        running = self._running
        self._tables.append_tokens(slots, tokens)
        self._state.counts.generated_tokens += len(slots)
        owners, sequence_ids = running.owners[slots], running.sequence_ids[slots]
        entries = (
            None if logprobs is None else LogprobColumns(owners[asks_logprobs], sequence_ids[asks_logprobs], logprobs)
        )
        self._state.events.tokens.append(TokenColumns(owners, sequence_ids, tokens, logprobs=entries))
        self._clear_suspects(slots)
        for _, sequence, ending in self._endings(slots, tokens):
            self._end(sequence, ending)

    def _apply_several(self, slots: Slots, rows: DraftedRows) -> None:
        """Appends several tokens, or none, to each of `slots`, column by column, up to the token that ends the
        sequence; tokens after it are dropped. Emits the rest and finishes the sequences that ended."""
        running = self._running
        ends: dict[int, tuple[Sequence, Ending]] = {}  # by row
        num_applied = np.zeros(len(slots), dtype=np.uint32)
        for column, tokens in enumerate(rows.columns()):
            active = np.flatnonzero((rows.counts > column) & (num_applied == column))
            active = active[[row not in ends for row in active.tolist()]] if ends else active
            self._tables.append_tokens(slots[active], tokens[active])
            num_applied[active] += 1
            ends |= {
                int(active[i]): (sequence, ending)
                for i, sequence, ending in self._endings(slots[active], tokens[active])
            }
        kept = rows.truncate(num_applied) if ends else rows
        self._state.counts.generated_tokens += len(kept.token_ids)
        owners, sequence_ids = running.owners[slots], running.sequence_ids[slots]
        if len(kept.token_ids):
            self._state.events.tokens.append(kept.token_columns(owners, sequence_ids))
        self._state.waiting.charge_output(
            running, np.repeat(slots, np.maximum(num_applied, 1) - 1)
        )  # one token was charged when the step was planned
        self._clear_suspects(slots[num_applied > 0])
        for sequence, ending in ends.values():
            self._end(sequence, ending)

    def _endings(self, slots: Slots, tokens: I32) -> list[tuple[int, Sequence, Ending]]:
        """Returns the sequences that the last of `tokens`, one for each of `slots`, ends: (index, sequence, ending)."""
        found = []
        for i in self._running.may_end(slots, tokens).tolist():
            sequence = self._running.sequence(int(slots[i]))
            ending = ending_of(sequence, int(tokens[i]))
            if ending is not None:
                found.append((i, sequence, ending))
        return found

    def _end(self, sequence: Sequence, ending: Ending) -> None:
        self._state.finish(sequence, ending.reason, ending.stop_token_id)

    def _clear_suspects(self, slots: Slots) -> None:
        """Removes slots that produced a token from the suspects: they did not kill the worker."""
        if self._state.suspects:
            self._state.suspects.difference_update(slots.tolist())

    def _apply_late(self, rows: DraftedRows, key: int) -> None:
        """Applies tokens of the sequence with this key, which lost its slot meanwhile: kept and emitted, up to the
        token that ends it, if it was preempted; dropped if it ended."""
        sequence = self._state.sequences.get(key)
        if sequence is None or sequence.status is not SequenceStatus.PREEMPTED:
            return
        num_applied, ending = 0, None
        for token in rows.token_ids.tolist():
            self._tables.append_late_token(sequence, token)
            num_applied += 1
            ending = ending_of(sequence, token)
            if ending is not None:
                break
        if not num_applied:
            return
        self._state.counts.generated_tokens += num_applied
        owners, sequence_ids = (
            np.array([sequence.owner], dtype=np.int32),
            np.array([sequence.sequence_id], dtype=np.uint32),
        )
        kept = rows.truncate(np.array([num_applied], dtype=np.uint32))
        self._state.events.tokens.append(kept.token_columns(owners, sequence_ids))
        if ending is not None:
            self._end(sequence, ending)

    def _fail(self, flight: InFlightStep, slot: int, failure: Failure) -> None:
        """Fails the sequence of a slot that the worker gave up on; a token that it reported for the slot is dropped."""
        keys = [flight.pooled_keys[slot]] if slot in flight.pooled_keys else flight.keys[flight.slots == slot].tolist()
        for key in keys:
            sequence = self._state.searches.root_of(key) or self._state.sequences.get(key)
            if sequence is not None and sequence.is_query:
                self._state.finish_internal(sequence, failure)
            elif sequence is not None:
                self._state.finish(sequence, Reason.ERROR, failure=failure)
