"""Plans are applied according to worker.proto, and invalid plans are detected."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

from quire.services.worker.codec.step_codec import decode_plan
from quire.services.worker.limits.kv_layout import KVLayout
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.step.plan_violation import PlanViolation
from quire.services.worker.step.slots import SlotTable, Step
from quire.services.worker.step.step_inputs import StepInputs, assemble
from quire.shared import columns
from quire.shared.kv.kv_specs import FULL, Cross, KVGroup
from quire.shared.pb.common.v1 import media_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.plans import New, PaperScheduler

LIMITS = WorkerLimits(block_size=4, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=40, num_blocks=61)


class ScheduledTable:
    """The table under test with the test scheduler."""

    def __init__(self) -> None:
        self.table = SlotTable(LIMITS)
        self.paper = PaperScheduler(LIMITS.block_size, LIMITS.num_blocks)

    def step(
        self, new: list[New] | None = None, counts: dict[int, int] | None = None, released: list[int] | None = None
    ) -> Step:
        return self.table.apply_plan(decode_plan(self.paper.plan(new, counts, released)))

    def inputs(self, *arguments: object, **keywords: object) -> StepInputs:
        return assemble(self.step(*arguments, **keywords), self.table)  # type: ignore[arg-type]


def summary(step: Step) -> list[tuple[int, int, int, bool]]:
    """Summarizes rows as (slot, first position, tokens, samples)."""
    columns_ = (step.slots.tolist(), step.starts.tolist(), step.counts.tolist(), step.samples.tolist())
    return list(zip(*columns_, strict=True))


def tokens(count: int) -> list[int]:
    return list(range(100, 100 + count))


def test_sequence_with_one_missing_token_decodes_by_default() -> None:
    scheduled = ScheduledTable()
    assert summary(scheduled.step([New(2, tokens(5))], {2: 5})) == [(2, 0, 5, True)]
    assert summary(scheduled.step()) == [(2, 5, 1, True)]
    assert summary(scheduled.step()) == [(2, 6, 1, True)]


def test_a_prefill_computes_only_what_is_counted() -> None:
    scheduled = ScheduledTable()
    assert summary(scheduled.step([New(0, tokens(9))])) == []
    assert summary(scheduled.step(counts={0: 4})) == [(0, 0, 4, False)]
    assert summary(scheduled.step()) == []
    assert summary(scheduled.step(counts={0: 5})) == [(0, 4, 5, True)]


def test_a_one_token_prompt_runs_at_once() -> None:
    assert summary(ScheduledTable().step([New(4, tokens(1))])) == [(4, 0, 1, True)]


def test_slot_with_zero_tokens_pauses_and_resumes() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(3)), New(1, tokens(4))], {0: 3, 1: 4})
    assert summary(scheduled.step(counts={0: 0})) == [(1, 4, 1, True)]
    assert summary(scheduled.step()) == [(0, 3, 1, True), (1, 5, 1, True)]


def test_cached_tokens_are_skipped_but_for_the_last_one() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(10))], {0: 10})
    shared = tuple(scheduled.paper.rows[0].blocks[:2])
    assert summary(scheduled.step([New(1, tokens(10), cached_blocks=shared)], {0: 0, 1: 2})) == [(1, 8, 2, True)]
    assert summary(scheduled.step([New(2, tokens(8), cached_blocks=shared)], {0: 0, 1: 0})) == [(2, 7, 1, True)]
    assert scheduled.table.block_table[1, :2].tolist() == list(shared)


def test_cached_positions_are_mapped_to_the_null_block() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(8))], {0: 8})
    shared = tuple(scheduled.paper.rows[0].blocks)
    inputs = scheduled.inputs([New(1, tokens(8), cached_blocks=shared), New(2, tokens(8))], {0: 0, 2: 8})
    own = scheduled.paper.rows[2].blocks
    assert inputs.slot_mapping.tolist() == [3, *(own[0] * 4 + i for i in range(4)), *(own[1] * 4 + i for i in range(4))]
    following = scheduled.inputs(counts={0: 0, 2: 0})
    assert following.slot_mapping.tolist() == [scheduled.paper.rows[1].blocks[2] * 4]


def test_inputs_of_a_mixed_step() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(1, tokens(3))], {1: 3})
    inputs = scheduled.inputs([New(0, tokens(9)), New(3, tokens(5))], {0: 6, 3: 5})
    assert inputs.slots.tolist() == [0, 1, 3]
    assert inputs.token_ids.tolist() == [100, 101, 102, 103, 104, 105, 0, 100, 101, 102, 103, 104]
    assert inputs.positions.tolist() == [0, 1, 2, 3, 4, 5, 3, 0, 1, 2, 3, 4]
    assert inputs.query_start.tolist() == [0, 6, 7, 12]
    assert inputs.seq_lens.tolist() == [6, 4, 5]
    assert (inputs.prev_sampled_tokens.tolist(), inputs.prev_sampled_slots.tolist()) == ([6], [1])
    assert (inputs.sampling_slots.tolist(), inputs.sampling_tokens.tolist()) == ([1, 3], [6, 11])
    assert inputs.sample_positions.tolist() == [4, 5]
    assert inputs.num_blocks == 2


def test_tokens_that_came_with_an_admission_are_not_fed_from_the_device() -> None:
    """The sequence was preempted and resumes with its output, all of which but the last token is cached."""
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(8))], {0: 8})
    shared = tuple(scheduled.paper.rows[0].blocks)
    inputs = scheduled.inputs([New(1, tokens(9), num_prompt=6, cached_blocks=shared)], {0: 0})
    assert inputs.token_ids.tolist() == [108]
    assert len(inputs.prev_sampled_tokens) == 0
    assert scheduled.inputs(counts={0: 0}).prev_sampled_slots.tolist() == [1]


def test_release_and_admission_of_a_slot_in_one_plan() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(6))], {0: 6})
    assert summary(scheduled.step([New(0, tokens(3))], {0: 3}, released=[0])) == [(0, 0, 3, True)]
    assert scheduled.table.num_blocks[0] == 1


def test_random_plans_match_a_simple_model() -> None:
    for seed in range(60):
        _run_randomly(random.Random(seed))


def _run_randomly(rng: random.Random) -> None:
    scheduled = ScheduledTable()
    for _ in range(40):
        rows = scheduled.paper.rows
        released = [slot for slot in rows if rows[slot].num_tokens >= 36 or rng.random() < 0.1]
        scheduled.paper.free = [*(b for slot in released for b in rows[slot].blocks), *scheduled.paper.free]
        free_slots = [slot for slot in range(LIMITS.max_num_seqs) if slot not in rows or slot in released]
        admitted = [New(slot, tokens(rng.randint(1, 20))) for slot in free_slots if rng.random() < 0.4]
        counts, lacking = {}, {slot: row.num_tokens - row.num_computed for slot, row in rows.items()}
        for slot in released:
            lacking.pop(slot)
        lacking |= {new.slot: len(new.tokens) for new in admitted}
        for slot, lack in lacking.items():
            if lack > 1 or rng.random() < 0.2:
                counts[slot] = rng.randint(0, min(lack, 10))
        inputs = scheduled.inputs(admitted, counts, released)
        _compare(scheduled, inputs)


def _compare(scheduled: ScheduledTable, inputs: StepInputs) -> None:
    table, rows = scheduled.table, scheduled.paper.rows
    assert np.flatnonzero(table.live).tolist() == sorted(rows)
    for slot, row in rows.items():
        assert table.num_tokens[slot] == row.num_tokens
        assert table.num_computed_tokens[slot] == row.num_computed
        assert table.block_table[slot, : table.num_blocks[slot]].tolist() == row.blocks
    assert inputs.sampling_slots.tolist() == scheduled.paper.sampling[-1]
    owned = sorted(block for row in rows.values() for block in row.blocks)
    assert np.flatnonzero(table.owned_blocks()).tolist() == owned
    assert len(set(inputs.slot_mapping.tolist())) == inputs.num_tokens, "every token has a place of its own"


def admission(slot: int, count: int = 3, cached: int = 0) -> pb.Admission:
    return pb.Admission(slot=slot, token_ids=columns.i32_bytes(tokens(count)), num_cached_tokens=cached)


def u32(*values: int) -> bytes:
    return columns.u32_bytes(list(values))


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (pb.StepPlan(released_slots=u32(1)), "not live"),
        (pb.StepPlan(released_slots=u32(0, 0)), "not ascending"),
        (pb.StepPlan(released_slots=u32(6)), "not ascending slots"),
        (pb.StepPlan(admitted=[admission(0)]), "slot 0 is live already"),
        (pb.StepPlan(admitted=[admission(1), admission(1)]), "slot 1 is live already"),
        (pb.StepPlan(admitted=[admission(6)]), "there are 6"),
        (pb.StepPlan(admitted=[admission(1, 0)]), "has 0 tokens"),
        (pb.StepPlan(admitted=[admission(1, 41)]), "has 41 tokens"),
        (pb.StepPlan(admitted=[admission(1, 3, cached=4)]), "4 of 3 tokens are cached"),
        (pb.StepPlan(counted_slots=u32(2), token_counts=u32(1)), "not live"),
        (pb.StepPlan(counted_slots=u32(0), token_counts=u32(2)), "which lack"),
        (pb.StepPlan(counted_slots=u32(0)), "1 counted_slots, 0 token_counts"),
        (pb.StepPlan(), "0 new_block_ids, but the slots lack 1"),
        (pb.StepPlan(new_block_ids=u32(5, 6)), "2 new_block_ids, but the slots lack 1"),
        (pb.StepPlan(new_block_ids=u32(0)), "not all in 1..60"),
        (pb.StepPlan(new_block_ids=u32(61)), "not all in 1..60"),
    ],
)
def test_a_plan_that_breaks_the_rules_is_refused(plan: pb.StepPlan, text: str) -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(4))], {0: 4})  # its block is full: the next token needs another one
    with pytest.raises(PlanViolation, match=text):
        scheduled.table.apply_plan(decode_plan(plan))


def attending(num_rows: int = 6, *blocks: int, items: int = 1, is_attended: bool = True) -> pb.StepPlan:
    item = media_pb2.MediaItem(
        identifier=b"i" * 32,
        length=num_rows if not is_attended else 1,
        num_embeddings=num_rows,
        is_attended=is_attended,
    )
    admitted = admission(0)
    admitted.cross_block_ids = u32(*blocks)
    admitted.media.extend([item] * items)
    return pb.StepPlan(admitted=[admitted], counted_slots=u32(0), token_counts=u32(3), new_block_ids=u32(7))


def attending_table() -> SlotTable:
    """Returns the table of a model whose decoder attends to at most 6 rows."""
    layout = KVLayout((KVGroup(FULL, (0,)), KVGroup(Cross(6), (0,))))
    return SlotTable(replace(LIMITS, layout=layout))


def test_a_sequence_has_the_blocks_of_its_encoders_output_until_it_is_released() -> None:
    table = attending_table()
    step = table.apply_plan(decode_plan(attending(6, 11, 12)))
    inputs = assemble(step, table)
    assert table.block_table[0].tolist() == [7, *(0 for _ in range(9)), 11, 12]
    assert inputs.num_attended is not None
    assert inputs.num_attended.tolist() == [6, 6, 6]
    assert list(zip(step.new_blocks.columns.tolist(), step.new_blocks.ids.tolist(), strict=True)) == [
        (10, 11),
        (11, 12),
        (0, 7),
    ]
    assert np.flatnonzero(table.owned_blocks()).tolist() == [7, 11, 12]
    table.apply_plan(decode_plan(pb.StepPlan(released_slots=u32(0))))
    assert not table.owned_blocks().any()


@pytest.mark.parametrize(
    ("plan", "text"),
    [
        (attending(6, 11), "1 cross_block_ids for 6 rows"),
        (attending(6, 11, 12, 13), "3 cross_block_ids for 6 rows"),
        (attending(7, 11, 12), "2 cross_block_ids for 7 rows"),
        (attending(6, 0, 12), "cross_block_ids are not all in 1..60"),
        (attending(6, 11, 61), "cross_block_ids are not all in 1..60"),
        (attending(6, 11, 12, items=0), "2 cross_block_ids for 0 rows"),
        (attending(6, 11, 12, items=2), "2 cross_block_ids for 0 rows"),
        (attending(6, 11, 12, is_attended=False), "2 cross_block_ids for 0 rows"),
    ],
)
def test_blocks_of_an_encoders_output_that_do_not_fit_are_refused(plan: pb.StepPlan, text: str) -> None:
    with pytest.raises(PlanViolation, match=text):
        attending_table().apply_plan(decode_plan(plan))


def test_a_step_over_the_token_budget_is_refused() -> None:
    scheduled = ScheduledTable()
    with pytest.raises(PlanViolation, match="66 tokens in a step of at most 64"):
        scheduled.step([New(slot, tokens(33)) for slot in (0, 1)], {0: 33, 1: 33})


def test_a_sequence_cannot_outgrow_its_table() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(40))], {0: 40})
    with pytest.raises(PlanViolation, match="outgrows 10 blocks"):
        scheduled.step()


def test_clear_forgets_everything() -> None:
    scheduled = ScheduledTable()
    scheduled.step([New(0, tokens(4)), New(3, tokens(2))], {0: 4, 3: 2})
    scheduled.table.clear()
    assert scheduled.table.num_live == 0
    fresh = scheduled.paper = PaperScheduler(LIMITS.block_size, LIMITS.num_blocks)
    assert summary(scheduled.step([New(3, tokens(2))], {3: 2})) == [(3, 0, 2, True)]
    assert scheduled.table.block_table[3, 0] == fresh.rows[3].blocks[0]
