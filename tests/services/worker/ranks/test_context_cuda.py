"""Context-parallel ranks on GPUs over NCCL, with CUDA graphs. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import error
from tests.services.worker.ranks.test_context import ROOM, SLOTS, coming_and_going, long_steps
from tests.services.worker.ranks.test_sharding import DIFFERENT, ranked
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import MAX_ERROR, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

Make = Callable[[str], Checkpoint]


@pytest.mark.parametrize("family", sorted(DIFFERENT))
def test_two_gpus_match_transformers(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    with ranked(made.folder, size=1, contexts=2, device="cuda", **ROOM, **WAYS["eager"]) as rig:
        long_steps(rig)
        assert max(error(rig, made, slot) for slot in SLOTS) < MAX_ERROR


@pytest.mark.parametrize("way", WAYS)
def test_steps_in_graphs_and_steps_that_are_shared_out_follow_each_other(checkpoint: Make, way: str) -> None:
    made, settings = checkpoint("llama"), {"device": "cuda", **ROOM, **WAYS[way]}
    said = []
    with ranked(made.folder, size=1, contexts=2, **settings) as rig:
        coming_and_going(rig)
        said.append([rig.tokens(slot) for slot in (0, 2, 3)])
    with ranked(made.folder, size=1, contexts=2, record_logits=False, **settings) as rig:
        coming_and_going(rig)
        said.append([rig.tokens(slot) for slot in (0, 2, 3)])
    whole = Rig(made.folder, **settings)
    coming_and_going(whole)
    assert said == [[whole.tokens(slot) for slot in (0, 2, 3)]] * 2


def test_memory_is_measured_by_both(checkpoint: Make) -> None:
    sizes = {"block_size": 64, "num_blocks": 0, "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 512}
    with ranked(
        checkpoint("llama").folder, size=1, contexts=2, device="cuda", attention_backend="auto", **sizes
    ) as rig:
        assert rig.replica.limits.num_blocks > 1000
