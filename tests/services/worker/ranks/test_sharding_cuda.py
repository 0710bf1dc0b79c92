"""A sharded model on GPUs, with NCCL inside CUDA graphs. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import error
from tests.services.worker.ranks.test_sharding import DIFFERENT, mixed_steps, ranked
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import MAX_ERROR, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

Make = Callable[[str], Checkpoint]


@pytest.mark.parametrize("family", sorted(DIFFERENT))
def test_two_gpus_match_transformers(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    with ranked(made.folder, device="cuda", **WAYS["eager"]) as rig:
        mixed_steps(rig)
        assert max(error(rig, made, slot) for slot in (0, 2, 5)) < MAX_ERROR


@pytest.mark.parametrize("way", [way for way in WAYS if "graphs" in way])
@pytest.mark.parametrize("family", ["llama-biases-tied", "qwen2-moe"])
def test_collectives_are_part_of_graphs(checkpoint: Make, family: str, way: str) -> None:
    made, settings = checkpoint(family), {"device": "cuda", **WAYS[way]}
    with ranked(made.folder, **settings) as rig:
        mixed_steps(rig)
        assert max(error(rig, made, slot) for slot in (0, 2, 5)) < MAX_ERROR
        said = [rig.tokens(slot) for slot in (0, 2, 5)]
    whole = Rig(made.folder, **settings)
    mixed_steps(whole)
    assert [whole.tokens(slot) for slot in (0, 2, 5)] == said


def test_memory_is_measured_by_both(checkpoint: Make) -> None:
    sizes = {"block_size": 64, "num_blocks": 0, "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 512}
    with ranked(checkpoint("llama").folder, device="cuda", attention_backend="auto", **sizes) as rig:
        assert rig.replica.limits.num_blocks > 1000
