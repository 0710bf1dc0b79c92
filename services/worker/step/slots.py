"""Slot table kept by scheduler and worker alike, and the effect of a plan on it (rules: worker.proto).

Plain numpy on the host: a step of 256 decoding slots costs a handful of array operations, no loop. A plan that breaks
the rules raises PlanViolation and leaves the table unusable until clear(): the session ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import field
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.drafts.drafted_states import StateLags
from quire.services.worker.step.plan import Admission, StepPlan
from quire.services.worker.step.plan_violation import require
from quire.shared import columns
from quire.shared.columns import I32, U32
from quire.shared.step_value import step_value

Rows = npt.NDArray[np.intp]

NO_TOKENS = np.empty(0, dtype=np.int32)


@step_value
class NewBlocks:
    """Blocks assigned to slots in a step: block_table[slots, columns] = ids.

    A table row concatenates the tables of all KV groups.
    """

    slots: Rows
    columns: Rows
    ids: I32

    def concatenated(self, others: NewBlocks) -> NewBlocks:
        """Returns these blocks followed by `others`; `others` itself if there are none here."""
        if not len(self.ids):
            return others
        return NewBlocks(
            np.concatenate((self.slots, others.slots)),
            np.concatenate((self.columns, others.columns)),
            np.concatenate((self.ids, others.ids)),
        )


NO_SLOTS: Rows = np.zeros(0, np.intp)
NO_BLOCKS = NewBlocks(NO_SLOTS, NO_SLOTS, NO_TOKENS)


@step_value
class ResolvedPlan:
    """Content of a plan after SlotTable.resolve(): its explicit part, and the counts and blocks that it implies."""

    released: U32
    admitted: Sequence[Admission]
    counts: I32  # [max_num_seqs] tokens that each slot computes
    new_blocks: NewBlocks
    stalled: Rows = field(default_factory=lambda: NO_SLOTS)  # slots that would sample but lack a block; ascending
    max_drafts: I32 | None = None  # [max_num_seqs] maximum drafts of each slot; None: the step has no drafts


@step_value
class Step:
    """Rows of a step, expanded from a resolved plan."""

    released: U32
    admitted: Sequence[Admission]
    slots: Rows  # [num_rows] slots that compute, ascending
    counts: I32  # [num_rows] tokens of each, at least 1
    starts: I32  # [num_rows] position of the first of them
    samples: npt.NDArray[np.bool_]  # [num_rows] whether the slot samples
    completed: Rows  # non-sampling slots whose tokens are all computed after this step; ascending
    new_blocks: NewBlocks
    lags: StateLags | None = None  # recurrent models that draft; None: states are up to date

    @property
    def num_tokens(self) -> int:
        return int(self.counts.sum())


class SlotTable:
    """State of all slots as numpy arrays [max_num_seqs], kept equal by scheduler and worker through the same plans;
    rows of free slots are meaningless."""

    drafts = False  # True: plans name the slot of each new block, and slots may advance by several tokens

    def __init__(self, limits: WorkerLimits) -> None:
        self._limits = limits
        self.block_size = limits.block_size
        num_slots = limits.max_num_seqs
        self.live = np.zeros(num_slots, dtype=np.bool_)
        self.num_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_computed_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_cached_tokens = np.zeros(num_slots, dtype=np.int32)
        self.num_admitted_tokens = np.zeros(num_slots, dtype=np.int32)  # from the admission
        self.num_blocks = np.zeros(num_slots, dtype=np.int32)  # in each KV group
        self.num_groups, self.width = limits.num_groups, limits.max_blocks_per_seq
        self._micro_batches = np.arange(num_slots) % limits.num_micro_batches
        self.cross_width, self.cross_length = limits.cross_width, limits.layout.cross_length
        self.cross_column = self.num_groups * self.width  # first column of the blocks of encoder outputs
        self.block_table = np.zeros((num_slots, self.cross_column + self.cross_width), dtype=np.int32)
        self.num_attended = np.zeros(num_slots, dtype=np.int32)  # rows of the encoder's output that each attends to
        self.non_sampling: set[int] = set()  # pooled slots
        self.admitted_tokens: list[I32] = [NO_TOKENS] * num_slots  # views of the admissions' columns

    @property
    def num_live(self) -> int:
        return int(np.count_nonzero(self.live))

    def owned_blocks(self) -> npt.NDArray[np.bool_]:
        """Returns a mask [num_blocks] of the blocks owned by live slots; the null block is owned by none."""
        owned = np.zeros(self._limits.num_blocks, dtype=np.bool_)
        slots = np.flatnonzero(self.live)
        if len(slots):
            for group in range(self.num_groups):
                self._mark_owned(owned, slots, group)
            owned[self._cross_blocks_of(slots)] = True
            owned[0] = False
        return owned

    def _mark_owned(self, owned: npt.NDArray[np.bool_], slots: Rows, group: int) -> None:
        """Sets in `owned` the blocks of `slots` in one KV group, without those that slid out of its window."""
        width = int(self.num_blocks[slots].max())
        places = np.arange(width)
        has = places < self.num_blocks[slots, None]
        length = dict(self._limits.layout.windows).get(group)
        if length is not None:  # blocks that slid out of the window may belong to other slots
            first = np.maximum(self.num_computed_tokens[slots] - length + 1, 0) // self.block_size
            has &= places >= first[:, None]
        begin = group * self.width
        owned[self.block_table[slots, begin : begin + width][has]] = True

    def _cross_blocks_of(self, slots: Rows) -> I32:
        """Returns the blocks of encoder outputs that `slots` attend to."""
        table = self.block_table[slots, self.cross_column :]
        has = np.arange(self.cross_width) < -(-self.num_attended[slots, None] // self.block_size)
        blocks: I32 = table[has]
        return blocks

    def clear(self) -> None:
        """Releases all slots, also after a PlanViolation."""
        self.live[:] = False
        self.num_attended[:] = 0
        self.num_blocks[:] = 0
        self.non_sampling.clear()
        self.admitted_tokens[:] = [NO_TOKENS] * len(self.admitted_tokens)

    def apply_plan(self, plan: StepPlan) -> Step:
        """Resolves `plan` and advances the table by it, assuming that it will be executed. Raises PlanViolation, after
        which the table is unusable until clear()."""
        return self.advance(self.resolve(plan))

    def resolve(self, plan: StepPlan) -> ResolvedPlan:
        """Releases and admits slots, moves beams, and assigns new blocks for what each slot is to compute; token counts
        stay as they were until advance(). Raises PlanViolation."""
        released, moved = self._begin(plan)
        counts = self._counts(plan)
        new_blocks = self._grow(counts, plan.new_block_ids)
        return ResolvedPlan(released, plan.changes.admitted, counts, moved.concatenated(new_blocks))

    def _begin(self, plan: StepPlan) -> tuple[U32, NewBlocks]:
        """Applies releases, admissions and beam moves; returns the released slots and the beams' new last blocks."""
        released = self._release(plan.changes.released_slots)
        attended = NO_BLOCKS
        for admission in plan.changes.admitted:
            self._admit(admission)
            if self.cross_width:
                attended = attended.concatenated(self._attend(admission))
        moves = plan.changes.beams
        return released, attended if moves is None else attended.concatenated(self._move(moves))

    def _attend(self, admission: Admission) -> NewBlocks:
        """Stores the blocks of the encoder's output that an admitted sequence attends to, and returns them. Raises
        PlanViolation unless it has one item with a block for each block_size rows."""
        slot, ids, items = admission.slot, admission.cross_block_ids.astype(np.int32), admission.media
        num_rows = items[0].num_embeddings if len(items) == 1 and items[0].is_attended else 0
        fits = 0 < num_rows <= self.cross_length and len(ids) == -(-num_rows // self.block_size)
        require(fits, lambda: f"admitted slot {slot}: {len(ids)} cross_block_ids for {num_rows} rows to attend to")
        self._require_blocks(ids, "cross_block_ids")
        places = self.cross_column + np.arange(len(ids))
        self.block_table[slot, places] = ids
        self.num_attended[slot] = num_rows
        return NewBlocks(np.full(len(ids), slot, dtype=np.intp), places, ids)

    def _move(self, moves: BeamMoves) -> NewBlocks:
        """Copies the parents' block tables to their beams and returns the blocks that replace last blocks, which beams
        do not share. Raises PlanViolation for slots that are not live, parents of another length, and block ids that do
        not fit."""
        moves.check()
        slots, parents = moves.slots, moves.parents
        both = np.concatenate((slots, parents))
        inside = bool((both < len(self.live)).all()) and bool(self.live[both].all())
        require(inside, lambda: f"beams: slots {slots} or parents {parents} are not live")
        level = bool((self.num_computed_tokens[slots] == self.num_computed_tokens[parents]).all())
        require(level, lambda: f"beams: {slots} and {parents} are not of one length")
        self.block_table[slots] = self.block_table[parents]
        self.num_blocks[slots] = self.num_blocks[parents]
        self.num_attended[slots] = self.num_attended[parents]
        size, last = self.num_groups, moves.last_block_ids
        require(len(last) == len(slots) * size, lambda: f"last_block_ids: {len(last)} of {len(slots)} x {size} groups")
        replaced = np.flatnonzero(last)
        if not len(replaced):
            return NO_BLOCKS
        rows, groups = np.divmod(replaced, size)
        slots, ids = slots[rows], last[replaced].astype(np.int32)
        self._require_blocks(ids, "last_block_ids")
        places = groups * self.width + self.num_blocks[slots].astype(np.intp) - 1
        self.block_table[slots, places] = ids
        return NewBlocks(slots, places, ids)

    def advance(self, order: ResolvedPlan) -> Step:
        """Counts the order's tokens as computed, and one sampled token for each slot that reaches its end; returns the
        rows of the step. Assumes that it will be executed."""
        slots = order.counts.nonzero()[0]
        counts, starts = order.counts[slots], self.num_computed_tokens[slots]
        ends = starts + counts
        samples = ends == self.num_tokens[slots]
        ended = NO_SLOTS
        if self.non_sampling:
            silent = np.isin(slots, list(self.non_sampling))
            ended, samples = slots[samples & silent], samples & ~silent
        self.num_computed_tokens[slots] = ends
        self.num_tokens[slots] += samples
        return Step(order.released, order.admitted, slots, counts, starts, samples, ended, order.new_blocks)

    def _release(self, slots: U32) -> U32:
        """Frees the slots and returns them. Raises PlanViolation if they do not ascend or are not live."""
        if len(slots):
            self._require_slots(slots, "released_slots")
            require(bool(self.live[slots].all()), lambda: f"released slots are not live: {slots[~self.live[slots]]}")
            self.live[slots] = False
            self.num_blocks[slots] = self.num_attended[slots] = 0
            for slot in slots.tolist():
                self.admitted_tokens[slot] = NO_TOKENS
                self.non_sampling.discard(slot)
        return slots

    def _admit(self, admission: Admission) -> None:
        """Stores a sequence in its slot; a fully cached one still computes its last token. Raises PlanViolation for a
        slot that is taken or out of range, and for token counts out of bounds."""
        slot, tokens = admission.slot, columns.i32(admission.token_ids)
        require(slot < len(self.live), lambda: f"admitted slot {slot}: there are {len(self.live)}")
        require(not self.live[slot], lambda: f"admitted slot {slot} is live already")
        longest = self._limits.max_model_len
        require(0 < len(tokens) <= longest, lambda: f"admitted slot {slot} has {len(tokens)} tokens, not 1..{longest}")
        cached = admission.num_cached_tokens
        require(cached <= len(tokens), lambda: f"admitted slot {slot}: {cached} of {len(tokens)} tokens are cached")
        if self._limits.layout.has_states:
            require(cached < len(tokens), lambda: f"admitted slot {slot}: its last token has changed the state already")
        self.live[slot] = True
        if admission.samples_nothing:
            self.non_sampling.add(slot)
        self.num_tokens[slot] = self.num_admitted_tokens[slot] = len(tokens)
        self.num_cached_tokens[slot] = cached
        self.num_computed_tokens[slot] = min(cached, len(tokens) - 1)
        self.admitted_tokens[slot] = tokens

    def _counts(self, plan: StepPlan) -> I32:
        """Returns the tokens that each slot computes, [max_num_seqs]: those that the plan names, and 1 for each other
        live slot of the micro-batch that lacks one. Raises PlanViolation for slots that are not live, more tokens than
        a slot lacks, and more than a step may have."""
        remaining = np.where(self.live, self.num_tokens - self.num_computed_tokens, 0).astype(np.int32, copy=False)
        counts = np.where(remaining == 1, remaining, 0).astype(np.int32, copy=False)
        if self.non_sampling:
            counts[list(self.non_sampling)] = 0
        most = self._limits.num_micro_batches
        if most > 1:
            number = plan.micro_batch
            require(number < most, lambda: f"micro_batch {number}: there are {most}")
            counts[self._micro_batches != number] = 0
        slots, wanted = plan.changes.counted_slots, plan.changes.token_counts
        require(len(slots) == len(wanted), lambda: f"{len(slots)} counted_slots, {len(wanted)} token_counts")
        if len(slots):
            self._require_slots(slots, "counted_slots")
            require(bool(self.live[slots].all()), lambda: f"counted slots are not live: {slots[~self.live[slots]]}")
            require(
                bool((wanted <= remaining[slots]).all()),
                lambda: f"token_counts {wanted} of slots {slots}, which lack {remaining[slots]}",
            )
            counts[slots] = wanted
        total, most = int(counts.sum()), self._limits.max_num_batched_tokens
        require(total <= most, lambda: f"{total} tokens in a step of at most {most}")
        return counts

    def _grow(self, counts: I32, ids: U32) -> NewBlocks:
        """Assigns `ids`, in ascending order of slots, so that each live slot has blocks for its computed tokens and
        `counts` more. Raises PlanViolation if they are too few or too many."""
        if self._limits.layout.has_no_kv:
            return self._grow_nothing(counts, ids)
        needed = -(-(self.num_computed_tokens + counts) // self.block_size)
        lacking = np.where(self.live, needed - self.num_blocks, 0)
        growing = lacking.nonzero()[0]
        return self.assign_blocks(growing, lacking[growing], ids)

    def _grow_nothing(self, counts: I32, ids: U32) -> NewBlocks:
        """Checks a plan of a model without KV and returns no blocks. Raises PlanViolation unless prompts are computed
        whole and no blocks are given."""
        slots = np.flatnonzero(counts)
        whole = bool((counts[slots] == self.num_admitted_tokens[slots]).all())
        require(whole, lambda: f"slots {slots} compute {counts[slots]} of {self.num_admitted_tokens[slots]} tokens")
        require(not len(ids), lambda: f"{len(ids)} new_block_ids, and nothing is kept")
        return NO_BLOCKS

    def grow(self, plan: StepPlan, growing: Rows, places: Rows) -> NewBlocks | None:
        """Assigns the new blocks of a plan without changes to the slots `growing`, one position each, which they start
        at `places`. Raises PlanViolation if ids are missing or surplus; tables that draft return None, without effect,
        if a slot would remain without a block."""
        return self.assign_blocks(growing, np.ones_like(growing), plan.new_block_ids)

    def assign_blocks(self, growing: Rows, gains: npt.NDArray[Any], ids: U32) -> NewBlocks:
        """Appends `gains` block positions to each slot of `growing`, each with one block of `ids` per KV group.

        Raises PlanViolation if ids are missing, surplus or out of range.
        """
        wanted = int(gains.sum()) * self.num_groups
        require(wanted == len(ids), lambda: f"{len(ids)} new_block_ids, but the slots lack {wanted} blocks")
        if not wanted:
            return NO_BLOCKS
        width = self.width
        require(int((self.num_blocks[growing] + gains).max()) <= width, lambda: f"a slot outgrows {width} blocks")
        self._require_blocks(ids, "new_block_ids", nulls=bool(self._limits.layout.windows))
        per_slot = gains * self.num_groups
        slots = growing.repeat(per_slot)
        block_starts = per_slot.cumsum() - per_slot  # index into `ids` of each slot's first block
        within = np.arange(wanted) - block_starts.repeat(per_slot)
        if self.num_groups == 1:
            places = self.num_blocks[slots] + within
        else:
            within, groups = np.divmod(within, self.num_groups)
            places = groups * width + self.num_blocks[slots] + within
        self.block_table[slots, places] = ids
        self.num_blocks[growing] += gains
        return NewBlocks(slots, places, ids.astype(np.int32))

    def _require_blocks(self, ids: U32 | I32, name: str, *, nulls: bool = False) -> None:
        """Raises PlanViolation naming `name` if an id is out of range. `nulls`: the null block is allowed (positions
        that slid out of a window)."""
        most, least = self._limits.num_blocks, 0 if nulls else 1
        inside = bool(ids.min() >= least and ids.max() < most)
        require(inside, lambda: f"{name} are not all in {least}..{most - 1}: {ids}")

    def _require_slots(self, slots: U32, name: str) -> None:
        """Raises PlanViolation naming `name` unless the slots ascend strictly and are in range; expects at least
        one."""
        ascending = bool((slots[1:] > slots[:-1]).all())
        require(ascending and slots[-1] < len(self.live), lambda: f"{name} are not ascending slots: {slots}")
