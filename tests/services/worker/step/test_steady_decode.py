"""Steps derived from the previous step equal those made from the slot table."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.spec_decode.slot_table import DraftingSlotTable
from quire.services.worker.step.plan import StepPlan
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.slots import NewBlocks, SlotTable
from quire.services.worker.step.steady_decode import SteadyDecode
from quire.services.worker.step.step_inputs import StepInputs, assemble
from quire.shared import columns
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.plans import New, PaperScheduler, admission
from tests.services.worker.step.test_slots import LIMITS, tokens


class SteadyAndGeneral:
    """One table with derived steps, one without."""

    def __init__(self) -> None:
        self.paper = PaperScheduler(LIMITS.block_size, LIMITS.num_blocks)
        self.table, self.plain = SlotTable(LIMITS), SlotTable(LIMITS)
        self.steady = SteadyDecode(self.table)
        self.num_followed = 0

    def step(self, *arguments: object, **keywords: object) -> None:
        plan = decode_plan(self.paper.plan(*arguments, **keywords))  # type: ignore[arg-type]
        step = self.plain.apply_plan(plan)
        want = assemble(step, self.plain), step.new_blocks
        for got, wanted in zip(self.made_from(plan), want, strict=True):
            assert_equal(got, wanted)
        live = self.plain.live
        for name in ("num_tokens", "num_computed_tokens", "num_blocks"):
            assert np.array_equal(getattr(self.table, name)[live], getattr(self.plain, name)[live]), name
        assert np.array_equal(self.table.owned_blocks(), self.plain.owned_blocks())

    def made_from(self, plan: StepPlan) -> tuple[StepInputs, NewBlocks]:
        followed = self.steady.follow(plan)
        if followed is not None:
            self.num_followed += 1
            return followed
        step = self.table.apply_plan(plan)
        inputs = assemble(step, self.table)
        self.steady.record(plan, inputs)
        return inputs, step.new_blocks


def assert_equal(got: StepInputs | NewBlocks, want: StepInputs | NewBlocks) -> None:
    for field in dataclasses.fields(want):
        if not field.compare:
            continue
        left, right = getattr(got, field.name), getattr(want, field.name)
        assert np.array_equal(left, right), field.name
        if isinstance(right, np.ndarray):
            assert left.dtype == right.dtype, field.name


def test_random_work() -> None:
    """Covers admissions, chunks, cached prompts, pauses and releases, with pure decode steps in between."""
    choose = random.Random(7)
    both = SteadyAndGeneral()
    for _ in range(600):
        rows = both.paper.rows
        grown = [slot for slot, row in rows.items() if row.num_tokens >= 36]
        released = sorted({slot for slot in rows if choose.random() < 0.02} | set(grown))
        for slot in released:
            both.paper.free[:0] = [block for block in rows[slot].blocks if block not in shared_blocks(both, slot)]
        pending = {s: r.num_tokens - r.num_computed for s, r in rows.items() if s not in released}
        counts = {slot: min(left, choose.randrange(1, 5)) for slot, left in pending.items() if left > 1}
        counts |= {slot: 0 for slot, left in pending.items() if left == 1 and choose.random() < 0.01}
        new = []
        free = set(range(LIMITS.max_num_seqs)) - set(rows)
        if free and choose.random() < 0.1:
            slot, length = min(free), choose.randrange(1, 12)
            new.append(New(slot, tokens(length)))
            counts[slot] = choose.randrange(1, length + 1)
        both.step(new, counts, released)
    assert both.num_followed > 100


def shared_blocks(both: SteadyAndGeneral, slot: int) -> set[int]:
    return {block for other, row in both.paper.rows.items() if other != slot for block in row.blocks}


def test_a_prompt_that_is_cached_whole_is_not_followed_into_its_shared_block() -> None:
    """Its last token is recomputed into the null block; later tokens are written to its own block."""
    both = SteadyAndGeneral()
    both.step([New(0, tokens(8))], {0: 8})
    both.step([New(3, tokens(8), cached_blocks=tuple(both.paper.rows[0].blocks[:2]))])
    for _ in range(6):
        both.step()
    assert both.num_followed == 5


def test_blocks_that_do_not_fit_the_rows_break_the_session() -> None:
    both = SteadyAndGeneral()
    both.step([New(0, tokens(3)), New(1, tokens(6))], {0: 3, 1: 6})
    both.step()
    plan = StepPlan(epoch=1, step_id=3)
    with pytest.raises(PlanViolation, match="0 new_block_ids, but the slots lack 1"):
        both.steady.follow(plan)
    plan = StepPlan(epoch=1, step_id=3, new_block_ids=np.array([LIMITS.num_blocks], np.uint32))
    with pytest.raises(PlanViolation, match="not all in"):
        both.steady.follow(plan)


class SteadyAndGeneralDrafting:
    """Both tables for a worker that may draft but does not, whose plans assign blocks early, in time or late."""

    def __init__(self, seed: int) -> None:
        self.table, self.plain = DraftingSlotTable(LIMITS, 4), DraftingSlotTable(LIMITS, 4)
        self.steady = SteadyDecode(self.table)
        self.num_followed = self.num_idle = 0
        self.choose = random.Random(seed)
        self.free = list(range(LIMITS.num_blocks - 1, 0, -1))
        self.step_id = 0

    def step(self, admissions: Sequence[pb.Admission] = (), counts: Mapping[int, int] | None = None) -> None:
        self.step_id += 1
        counts = counts or {}
        named = sorted([*(slot for slot, count in counts.items() for _ in range(-(-count // LIMITS.block_size)))])
        if not counts:
            named = [slot for slot in np.flatnonzero(self.plain.live).tolist() if self.is_given(slot)]
        wire = pb.StepPlan(
            epoch=1,
            step_id=self.step_id,
            admitted=admissions,
            counted_slots=columns.u32_bytes(sorted(counts)),
            token_counts=columns.u32_bytes([counts[slot] for slot in sorted(counts)]),
            new_block_slots=columns.u32_bytes(named),
            new_block_ids=columns.u32_bytes([self.free.pop() for _ in named]),
        )
        plan = decode_plan(wire)
        order = self.plain.resolve(plan)
        want = assemble(self.plain.advance(order), self.plain), order.new_blocks
        self.num_idle += len(order.stalled)
        for got, wanted in zip(self.made_from(plan), want, strict=True):
            assert_equal(got, wanted)
        for name in ("num_tokens", "num_computed_tokens", "num_blocks", "block_table"):
            assert np.array_equal(getattr(self.table, name), getattr(self.plain, name)), name

    def is_given(self, slot: int) -> bool:
        """Draws whether the slot gets a block, mostly when it needs one."""
        left = int(self.plain.num_blocks[slot]) * LIMITS.block_size - int(self.plain.num_computed_tokens[slot])
        return self.choose.random() < (0.75 if left <= 0 else 0.1 if left < LIMITS.block_size else 0)

    def made_from(self, plan: StepPlan) -> tuple[StepInputs, NewBlocks]:
        followed = self.steady.follow(plan)
        if followed is not None:
            self.num_followed += 1
            return followed
        order = self.table.resolve(plan)
        inputs = assemble(self.table.advance(order), self.table)
        if len(order.stalled):
            self.steady.forget()
        else:
            self.steady.record(plan, inputs)
        return inputs, order.new_blocks


def test_blocks_that_are_named_come_early_in_time_or_late() -> None:
    drafting = [SteadyAndGeneralDrafting(seed) for seed in range(8)]
    lengths = [3, 4, 6]
    for both in drafting:
        new = [admission(New(slot, tokens(length)), LIMITS.block_size) for slot, length in enumerate(lengths)]
        both.step(new, dict(enumerate(lengths)))
        for _ in range(25):
            both.step()
    assert sum(both.num_followed for both in drafting) > 80
    assert sum(both.num_idle for both in drafting) > 8
