"""Steps with drafts are warmed up for models with several KV groups, as workers on GPUs do at start."""

from __future__ import annotations

import pytest

from quire.services.worker.building import draft_warmup
from tests.kv_groups.models import Make
from tests.kv_groups.test_recurrent_drafts import DRAFTED, THREE
from tests.kv_groups.test_states import check
from tests.kv_groups.test_windows import pair, prompt
from tests.spec_decode.test_draft_warmup import drafts_of_steps


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("name", ["alternating", "one-in-three", *DRAFTED])
def test_draft_warmup_leaves_state_unchanged(made: Make, name: str, block_size: int) -> None:
    checkpoint = made(name)
    run = pair(checkpoint, THREE, block_size=block_size, max_num_batched_tokens=400, max_num_seqs=16)
    counts = drafts_of_steps(run.replica)
    assert [sum(each) for each in counts[2::3]] == list(draft_warmup.SIZES)
    assert len(run.replica.end_epoch().block_ids) == 0
    answers = [run.ask(prompt(5, seed) * 4, max_tokens=24, eos=()) for seed in range(3)]
    run.run()
    check(checkpoint, answers, 24)
    assert run.core.use.used == 0
