"""Forward passes of drafters: positions and KV places of their batches' tokens."""

from __future__ import annotations

import numpy as np
import torch

from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.spec_decode.draft_models.draft_passes import DraftPasses
from quire.services.worker.step.slots import SlotTable

LONGEST = 40
LIMITS = WorkerLimits(block_size=4, max_num_seqs=6, max_num_batched_tokens=64, max_model_len=LONGEST, num_blocks=61)


def test_drafts_do_not_exceed_the_maximum_position() -> None:
    """A sequence close to its end has fewer drafts than others, and models have tables up to the maximum
    position only."""
    table = SlotTable(LIMITS)
    table.block_table[:] = np.arange(1, 1 + table.block_table.size).reshape(table.block_table.shape)
    slots, starts, counts = np.array([1, 4]), np.array([LONGEST - 1, 9], np.int32), np.array([1, 4], np.int32)
    batches = list(DraftPasses(table, torch.device("cpu")).drafts(slots, starts, counts))
    assert len(batches) == 4
    assert [int(batch.positions[1]) for batch in batches] == [9, 10, 11, 12]
    assert int(batches[0].positions[0]) == LONGEST - 1
    for batch in batches:
        assert int(batch.positions.max()) < LONGEST
    assert [int(batch.slot_mapping[0]) for batch in batches[1:]] == [0, 0, 0], (
        "the sequence's blocks are not written again"
    )
