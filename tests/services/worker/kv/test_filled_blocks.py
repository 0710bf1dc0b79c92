"""Positions of cached blocks that hold a drafter's KV, when blocks are reallocated as a whole or in part."""

from __future__ import annotations

import numpy as np
import pytest

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.spec_decode.draft_models.draft_passes import FilledBlocks
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.slots import NewBlocks, SlotTable

LIMITS = WorkerLimits(block_size=8, max_num_seqs=4, max_num_batched_tokens=64, max_model_len=40, num_blocks=20)


class Drafter:
    """Block handling of a drafter."""

    def __init__(self) -> None:
        self.table = SlotTable(LIMITS)
        self.blocks = FilledBlocks(self.table, LIMITS.num_blocks)

    def begin(self, slot: int, blocks: list[int], num_cached: int = 0, copied: int = 0) -> int:
        """Starts a sequence with `blocks`, the block at `num_cached` being a copy of `copied`; returns the number of
        filled positions."""
        self.table.block_table[slot, : len(blocks)] = blocks
        self.table.num_cached_tokens[slot] = num_cached
        if copied:
            target = blocks[num_cached // LIMITS.block_size]
            self.blocks.copy(BlockCopies(np.array([copied], np.uint32), np.array([target], np.uint32)))
        filled = self.blocks.start_sequence(slot)
        count = len(blocks)
        self.blocks.add_blocks(NewBlocks(np.full(count, slot), np.arange(count), np.array(blocks, dtype=np.int32)))
        return filled

    def fill(self, slot: int, num_positions: int) -> None:
        self.blocks.mark(np.array([slot]), np.array([num_positions], dtype=np.int32))


@pytest.fixture
def drafter() -> Drafter:
    made = Drafter()
    assert made.begin(0, [5, 6, 7]) == 0
    made.fill(0, 21)
    return made


@pytest.mark.parametrize("num_cached", [8, 16])
def test_whole_blocks_are_filled_for_all_sharing_sequences(drafter: Drafter, num_cached: int) -> None:
    assert drafter.begin(1, [5, 6, 8], num_cached) == num_cached


@pytest.mark.parametrize("num_cached", [17, 20, 21])
def test_a_copy_is_filled_as_far_as_it_is_used(drafter: Drafter, num_cached: int) -> None:
    assert drafter.begin(1, [5, 6, 8], num_cached, copied=7) == num_cached
    drafter.fill(1, 24)
    assert drafter.begin(2, [5, 6, 8], 24) == 24


def test_copy_lacks_positions_that_the_source_lacks(drafter: Drafter) -> None:
    assert drafter.begin(1, [5, 6, 8], 23, copied=7) == 21


def test_positions_after_the_used_part_of_a_copy_are_not_filled(drafter: Drafter) -> None:
    drafter.fill(0, 24)
    assert drafter.begin(1, [5, 6, 8], 18, copied=7) == 18
    assert drafter.begin(2, [5, 6, 8], 24) == 18, "nobody has filled the rest since"


def test_a_block_that_is_written_on_stays_filled_up_to_there(drafter: Drafter) -> None:
    assert drafter.begin(1, [5, 6, 7], 21) == 21


def test_restarted_block_is_not_filled(drafter: Drafter) -> None:
    drafter.begin(1, [6])
    assert drafter.begin(2, [5, 6, 7], 21) == 8


def test_positions_after_a_gap_do_not_count(drafter: Drafter) -> None:
    drafter.begin(1, [9, 10])
    drafter.fill(1, 4)
    assert drafter.begin(2, [5, 9, 6], 24) == 12
