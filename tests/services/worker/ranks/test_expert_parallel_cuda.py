"""Experts that move between two GPUs while sequences run. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import error
from tests.services.worker.ranks.test_sharding import mixed_steps, ranked
from tests.services.worker.test_cuda import MAX_ERROR, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

Make = Callable[[str], Checkpoint]


@pytest.mark.parametrize("way", ["eager", *(way for way in WAYS if "graphs" in way)])
@pytest.mark.parametrize(("family", "copies"), [("mixtral", 0), ("qwen2-moe", 4)])
def test_moving_experts_match_transformers(checkpoint: Make, family: str, copies: int, way: str) -> None:
    """Includes CUDA graphs recorded before the moves."""
    made = checkpoint(family)
    eplb = {"enable_eplb": True, "eplb_step_interval": 1, "num_redundant_experts": copies}
    with ranked(made.folder, device="cuda", expert_parallel=True, **eplb, **WAYS[way]) as rig:
        mixed_steps(rig)
        assert rig.replica.experts.balance.num_moved > 0
        assert max(error(rig, made, slot) for slot in (0, 2, 5)) < MAX_ERROR
