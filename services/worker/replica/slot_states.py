"""State of a replica's slots, and the application of plans to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.services.worker.replica.block_record import BlockRecord
from quire.services.worker.replica.flight import Runner, StepChanges
from quire.services.worker.sampling.features.component import check_token_ids
from quire.services.worker.spec_decode.no_speculation import NoSpeculation
from quire.services.worker.spec_decode.speculation import Speculation
from quire.services.worker.step.admission import SlotAdmission
from quire.services.worker.step.media_items import without_unknown_placeholders
from quire.services.worker.step.plan import Admission, StepPlan
from quire.services.worker.step.rope_positions import PlainPositions
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.steady_decode import SteadyDecode
from quire.services.worker.step.step_inputs import StepInputs, assemble
from quire.shared.columns import I32, U32
from quire.shared.errors import QuireError


class SlotStates:
    """Owns per-slot state set by admissions; the slot table is shared with the record and the speculation."""

    def __init__(
        self,
        record: BlockRecord,
        runner: Runner,
        speculation: Speculation | NoSpeculation,
        vocab_size: int,
        *,
        num_blocks: int,
        positions: PlainPositions,
    ) -> None:
        self._record, self._runner, self._speculation = record, runner, speculation
        self._vocab_size, self._num_blocks, self._positions = vocab_size, num_blocks, positions
        self._table = record.table
        self.steady = SteadyDecode(record.table)
        self.refused: dict[int, QuireError] = {}  # by slot: error of its admission
        self.bans: dict[int, tuple[str, ...]] = {}  # by slot: see SlotAdmission
        self._hashed_tokens: dict[int, I32] = {}  # by slot: tokens as admitted, with placeholders that are unknown

    def apply_plan(self, plan: StepPlan) -> tuple[StepInputs, NewBlocks, StepChanges]:
        """Applies a plan: releases and admits slots, copies blocks, moves beams; returns the step to launch. Raises
        PlanViolation; the state is then undefined until clear()."""
        copies = plan.changes.copies
        if copies is not None:
            copies.check(self._num_blocks)
            self._speculation.copy_blocks(copies)
        order = self._table.resolve(plan)
        self._release_all(order.released)
        for admission in order.admitted:
            self._admit(admission)
        step, drafts = self._speculation.advance(order)
        inputs = self._positions.in_step(assemble(step, self._table, drafts))
        if self._hashed_tokens:
            inputs = self._with_hashed_tokens(inputs)
        if drafts is None and not len(order.stalled):
            self.steady.record(plan, inputs)
        else:
            self.steady.forget()
        changes = StepChanges(order.stalled, copies, plan.changes.beams)
        changes.apply_to_device(self._runner)
        return inputs, order.new_blocks, changes

    def due_refusals(self, inputs: StepInputs) -> dict[int, QuireError]:
        """Returns the refusals of slots that sample or end in the step."""
        due = {*inputs.sampling_slots.tolist(), *inputs.completed_slots.tolist()}
        return {slot: error for slot, error in self.refused.items() if slot in due}

    def clear(self) -> None:
        """Releases every live slot and clears the table."""
        for slot in np.flatnonzero(self._table.live).tolist():
            self._release(slot)
        self._table.clear()
        self.steady.forget()

    def _admit(self, admission: Admission) -> None:
        """Admits a sequence to its slot in record, heads and speculation. An invalid request is stored in `refused`;
        its step is computed anyway, with invalid token ids replaced by 0."""
        slot, tokens = admission.slot, self._table.admitted_tokens[admission.slot]
        self._record.admit(slot, admission.root_hash, admission.media)
        if admission.media:
            self._runner.media.admit(slot, admission.media, int(self._table.num_computed_tokens[slot]))
            if admission.writes_cross:
                self._runner.media.write(admission.media[0], admission.cross_block_ids)
            admission, tokens = self._without_unknown_placeholders(admission, tokens)
        try:
            check_token_ids(tokens, self._vocab_size, "token_ids")
            self._positions.admit(slot, admission.media)
            asked = SlotAdmission.of(admission)
            self._runner.heads.admit(slot, asked)
            if asked.bans:
                self.bans[slot] = asked.bans
        except QuireError as error:
            self.refused[slot] = error
            # The step is computed anyway, as the scheduler relies on the contents of the blocks.
            self._table.admitted_tokens[slot] = np.where((tokens >= 0) & (tokens < self._vocab_size), tokens, 0)
        self._speculation.start_sequence(slot, self._table.admitted_tokens[slot])

    def _without_unknown_placeholders(self, admission: Admission, tokens: I32) -> tuple[Admission, I32]:
        """Returns the admission and its tokens with 0 in the place of placeholders that the vocabulary lacks; the
        embedding table has no rows for them. Block hashes keep them."""
        known = without_unknown_placeholders(tokens, admission.media, self._vocab_size)
        if known is tokens:
            return admission, tokens
        self._hashed_tokens[admission.slot] = tokens
        self._table.admitted_tokens[admission.slot] = known
        return replace(admission, token_ids=known.tobytes()), known

    def _with_hashed_tokens(self, inputs: StepInputs) -> StepInputs:
        """Returns the step with the tokens that block hashes are made of, if it computes placeholders that are not in
        the vocabulary."""
        hashed = None
        for slot, tokens in self._hashed_tokens.items():
            row = int(np.searchsorted(inputs.slots, slot))
            if row == inputs.num_rows or inputs.slots[row] != slot:
                continue
            first, last = inputs.query_start[row], inputs.query_start[row + 1]
            begin = int(inputs.seq_lens[row]) - int(last - first)
            given = tokens[begin : begin + int(last - first)]
            if len(given):
                hashed = inputs.token_ids.copy() if hashed is None else hashed
                hashed[first : first + len(given)] = given
        return inputs if hashed is None else replace(inputs, hashed_token_ids=hashed)

    def _release_all(self, released: U32) -> None:
        """Launches pending heads that name the released slots, then releases each."""
        if len(released):
            self._runner.launch_pending_heads(released.astype(np.intp))  # their pending samples are discarded
        for slot in released.tolist():
            self._release(slot)

    def _release(self, slot: int) -> None:
        """Drops the state of a slot in record, heads and speculation, with its refusal and bans."""
        self._record.release(slot)
        if slot in self._runner.media.pending:
            self._runner.media.release(slot)
        self._positions.release(slot)
        self._hashed_tokens.pop(slot, None)
        self.refused.pop(slot, None)
        self.bans.pop(slot, None)
        self._speculation.end_sequence(slot)
        self._runner.heads.release(slot)
