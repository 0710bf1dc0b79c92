"""Rows dispatched from GPU to GPU, alternating with CUDA graphs that all-reduce. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from quire.services.worker.layers.feed_forward.dispatch import ExpertDispatch
from tests.observing import calls_of
from tests.services.worker.models.test_logits import error
from tests.services.worker.ranks.test_dispatch import ALL_TO_ALL, MOVING
from tests.services.worker.ranks.test_expert_parallel import Make
from tests.services.worker.ranks.test_sharding import mixed_steps, ranked
from tests.services.worker.test_cuda import MAX_ERROR, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]


@pytest.mark.parametrize("way", ["eager", *(way for way in WAYS if "graphs" in way)])
@pytest.mark.parametrize("family", ["qwen2-moe", "llama4", "gpt-oss", "deepseek-v3", "mixtral"])
def test_dispatching_ranks_match_transformers(checkpoint: Make, family: str, way: str) -> None:
    made = checkpoint(family)
    with ranked(made.folder, device="cuda", **ALL_TO_ALL, **WAYS[way]) as rig, crossings() as found:
        mixed_steps(rig)
        assert max(error(rig, made, slot) for slot in (0, 2, 5)) < MAX_ERROR
    assert found or way == "chunks in graphs", "prompts that no graph has cross"


@pytest.mark.parametrize("way", ["eager", "graphs"])
def test_experts_that_move_at_every_step(checkpoint: Make, way: str) -> None:
    made = checkpoint("qwen2-moe")
    settings = {**ALL_TO_ALL, **MOVING, "num_redundant_experts": 4, **WAYS[way]}
    with ranked(made.folder, device="cuda", **settings) as rig:
        mixed_steps(rig)
        assert rig.replica.experts.balance.num_moved > 0
        assert max(error(rig, made, slot) for slot in (0, 2, 5)) < MAX_ERROR


@contextmanager
def crossings() -> Iterator[list[Any]]:
    """Routes of rank 0 that are found in the block, by layer and step."""
    found: list[Any] = []
    with calls_of(ExpertDispatch.routes, on_return=lambda call: found.append(call.result)):
        yield found
