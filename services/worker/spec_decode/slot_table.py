"""Slot table of a worker that drafts (worker.proto: "With a worker that drafts")."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.step.drafts.drafted_states import StateLags
from quire.services.worker.step.drafts.drafts import Drafts
from quire.services.worker.step.plan import Admission, StepPlan
from quire.services.worker.step.plan_violation import require
from quire.services.worker.step.slots import NO_BLOCKS, NO_SLOTS, NewBlocks, ResolvedPlan, Rows, SlotTable, Step
from quire.shared.columns import I32, U32


class DraftingSlotTable(SlotTable):
    """Slot table that counts drafts in `num_tokens` and `num_computed_tokens` once commit_accepted() is called for
    them."""

    drafts = True

    def __init__(self, limits: WorkerLimits, num_speculative_tokens: int) -> None:
        super().__init__(limits)
        self.num_speculative_tokens = num_speculative_tokens
        self.num_draft_tokens = 0  # maximum drafts per slot, as last ordered by a plan
        self._has_states = limits.layout.has_states
        # Accepted drafts that recurrent states have not consumed yet, by slot.
        self._lags = np.zeros(limits.max_num_seqs, dtype=np.int32)

    def clear(self) -> None:
        """Releases all slots and orders no drafts until a plan does."""
        super().clear()
        self.num_draft_tokens = 0

    def _admit(self, admission: Admission) -> None:
        """Stores a sequence in its slot, whose recurrent state is up to date."""
        super()._admit(admission)
        self._lags[admission.slot] = 0

    def resolve(self, plan: StepPlan) -> ResolvedPlan:
        """Resolves a plan into token counts and blocks: rows that lack blocks for their next token are idle in this
        step, unless the plan names their count. Raises PlanViolation for those, and for invalid blocks."""
        changes = plan.changes
        if changes.num_draft_tokens is not None:
            self.num_draft_tokens = min(changes.num_draft_tokens, self.num_speculative_tokens)
        released, moved = self._begin(plan)
        counts = self._counts(plan)
        new_blocks = self._assign_named_blocks(plan.new_block_slots, plan.new_block_ids)
        named = changes.counted_slots
        num_free = self.num_blocks * self.block_size - self.num_computed_tokens
        lacking = (counts > 0) & (counts > num_free)
        idle = NO_SLOTS
        if lacking.any():
            require(
                not lacking[named].any(), lambda: f"no blocks for what slots {named[lacking[named]]} are to compute"
            )
            idle = np.flatnonzero(lacking)
            counts[idle] = 0
        new_blocks = moved.concatenated(new_blocks)
        return ResolvedPlan(released, changes.admitted, counts, new_blocks, idle, self._max_drafts(counts, named))

    def grow(self, plan: StepPlan, growing: Rows, places: Rows) -> NewBlocks | None:
        """Assigns the blocks that a steady plan names; a slot may have got its blocks earlier, or may need none.
        Returns None, before assigning, if a growing slot lacks a block that the plan does not name."""
        slots, ids = plan.new_block_slots, plan.new_block_ids
        if len(slots) == len(ids) == len(growing) and (slots == growing).all():  # each once, and live
            return self.assign_blocks(growing, np.ones_like(growing), ids)
        lacking = growing[self.num_blocks[growing] <= places]
        if not set(lacking.tolist()).issubset(slots.tolist()):
            return None
        return self._assign_named_blocks(slots, ids)

    def advance(self, order: ResolvedPlan, drafts: Drafts | None = None) -> Step:
        """Advances the slots as if every draft were refused, and returns a step that computes the drafts nevertheless;
        commit_accepted() counts the accepted ones afterwards."""
        step = super().advance(order)
        if self._has_states:
            step = self._catch_up_states(step, drafting=drafts is not None)
        if drafts is None:
            return step
        counts = step.counts.copy()
        counts[np.searchsorted(step.slots, drafts.slots)] += drafts.counts
        return replace(step, counts=counts)

    def commit_accepted(self, slots: Rows, counts: I32) -> None:
        """Counts the accepted drafts of `slots`, for each of which `counts` tokens have been sampled: all but one of
        these were drafts. Called once a step's output is known."""
        self.num_tokens[slots] += counts - 1
        self.num_computed_tokens[slots] += counts - 1
        if self._has_states:
            self._lags[slots] = np.maximum(counts - 1, 0)

    def _catch_up_states(self, step: Step, *, drafting: bool) -> Step:
        """Adds to the step, if it drafts or states lag behind, how many positions each row's recurrent state has to
        catch up, and counts the states as up to date."""
        counts = self._lags[step.slots]
        if not drafting and not counts.any():
            return step
        self._lags[step.slots] = 0
        return replace(step, lags=StateLags(counts, self.num_speculative_tokens, self.block_size))

    def _assign_named_blocks(self, slots: U32, ids: U32) -> NewBlocks:
        """Assigns `ids` to `slots` (one entry per block, a slot's entries adjacent) and returns them. Raises
        PlanViolation for lists of different lengths, slots that are not live, and incomplete block groups."""
        require(len(slots) == len(ids), lambda: f"{len(slots)} new_block_slots, {len(ids)} new_block_ids")
        if not len(ids):
            return NO_BLOCKS
        begins = np.ones(len(slots) + 1, dtype=np.bool_)  # first block of each slot, and the end
        np.not_equal(slots[1:], slots[:-1], out=begins[1:-1])
        bounds = np.flatnonzero(begins)
        growing, gains = slots[bounds[:-1]], bounds[1:] - bounds[:-1]
        self._require_slots(growing, "new_block_slots")
        require(bool(self.live[growing].all()), lambda: f"new_block_slots are not live: {growing[~self.live[growing]]}")
        positions, rest = np.divmod(gains, self.num_groups)
        require(not rest.any(), lambda: f"new_block_slots: {gains} blocks are not {self.num_groups} for each position")
        return self.assign_blocks(growing.astype(np.intp), positions, ids)

    def max_drafts(self, slots: Rows) -> I32:
        """Returns the maximum drafts of slots that advance without being named, [num_slots]: as ordered, and as blocks
        and positions allow.

        With recurrent states the last position of a block is never a draft's: a sequence that starts after the block
        reads the state stored there.
        """
        computed = self.num_computed_tokens[slots]
        num_free = np.minimum(self.num_blocks[slots] * self.block_size, self._limits.max_model_len) - computed
        if self._has_states:
            num_free = np.minimum(num_free, self.block_size - 1 - computed % self.block_size)
        limit: I32 = np.clip(num_free - 1, 0, self.num_draft_tokens)
        return limit

    def _max_drafts(self, counts: I32, named: U32) -> I32 | None:
        """Returns the maximum drafts of all slots, [max_num_seqs]: 0 for slots that compute more than one token or that
        the plan names; None if no drafts are ordered."""
        if not self.num_draft_tokens:
            return None
        limit = np.zeros_like(counts)
        slots = np.flatnonzero(counts == 1)
        limit[slots] = self.max_drafts(slots)
        limit[named] = 0
        return limit
