"""Overlapped all-reduces on GPUs with copy engines. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from quire.services.worker.ranks.collectives import group_collectives
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import error
from tests.services.worker.ranks import overlapped_build
from tests.services.worker.ranks.test_sharding import mixed_steps, ranked
from tests.services.worker.test_cuda import MAX_ERROR, WAYS

pytestmark = pytest.mark.gpu

Make = Callable[[str], Checkpoint]


@pytest.mark.parametrize("way", ["eager", "chunks in graphs"])
@pytest.mark.parametrize("family", ["llama-biases-tied", "qwen2-moe"])
def test_pieces_match_transformers(checkpoint: Make, monkeypatch: pytest.MonkeyPatch, family: str, way: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    for device, opener in overlapped_build.OVERLAPPED_SUMS.items():
        monkeypatch.setitem(group_collectives.OVERLAPPED_SUMS, device, opener)
    overlapped_build.added.clear()
    made, settings = checkpoint(family), {"device": "cuda", "overlap_all_reduce": True, **WAYS[way]}
    with ranked(made.folder, build=overlapped_build.build, **settings) as rig:
        mixed_steps(rig)
        assert max(error(rig, made, slot) for slot in (0, 2, 5)) < MAX_ERROR
        assert overlapped_build.added or way != "eager"
