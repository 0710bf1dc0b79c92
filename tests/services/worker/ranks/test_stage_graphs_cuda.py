"""Stages on GPUs with layers in CUDA graphs and NCCL between them. Needs two GPUs: pytest -m gpu."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_pipeline import SLOTS, by_turns, prefill
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.ranks.test_stage_graphs import said_by_one, said_by_stages
from tests.services.worker.replica_internals import chunk_graphs_of, decode_graphs_of, sample_graphs_of
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import MAX_ERROR, SINGLE_ROW_SIZES, WAYS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("two_gpus")]

Make = Callable[[str], Checkpoint]
RECORDED = [way for way in WAYS if "graphs" in way]


def num_recordings(rig: Rig) -> list[int]:
    """Number of recorded chunks, decodes and samplers on the first stage."""
    graphs = (chunk_graphs_of(rig.replica), decode_graphs_of(rig.replica), sample_graphs_of(rig.replica))
    return [0 if each is None else each.count for each in graphs]


@pytest.mark.parametrize("way", [*RECORDED, "eager"])
@pytest.mark.parametrize("family", ["llama-biases-tied", "gemma3-tied", "qwen2-moe"])
def test_two_stages_match_transformers(checkpoint: Make, family: str, way: str) -> None:
    """Layers and output head are recorded, sampling is not."""
    made, settings = checkpoint(family), {"device": "cuda", **WAYS[way]}
    with ranked(made.folder, 1, 2, **settings) as rig:
        recorded = way == "chunks in graphs", way != "eager", way != "eager"
        assert tuple(count > 0 for count in num_recordings(rig)) == recorded
        prefill(rig)
        by_turns(rig, 12, 2)
        assert max(error(rig, made, slot) for slot in SLOTS) < MAX_ERROR


@pytest.mark.parametrize("most_under_way", [0, 3])
@pytest.mark.parametrize("way", RECORDED)
def test_two_stages_sample_as_one_gpu(checkpoint: Make, way: str, most_under_way: int) -> None:
    """Fully recorded steps mixed with eager ones, with several in flight."""
    made, settings = checkpoint("llama"), {"device": "cuda", "record_logits": False, **WAYS[way]}
    expected = said_by_one(Rig(made.folder, **settings))
    with ranked(made.folder, 1, 2, **settings) as rig:
        assert said_by_stages(rig, most_under_way) == expected


@pytest.mark.parametrize("way", RECORDED)
def test_two_stages_of_two_gpus_sample_as_one(checkpoint: Make, way: str) -> None:
    """All-reduces of a stage's ranks are inside its graphs."""
    if torch.cuda.device_count() < 4:
        pytest.skip("fewer than four GPUs")
    made, settings = checkpoint("llama-biases-tied"), {"device": "cuda", "record_logits": False, **WAYS[way]}
    expected = said_by_one(Rig(made.folder, **settings))
    with ranked(made.folder, 2, 2, **settings) as rig:
        assert said_by_stages(rig, most_under_way=3) == expected


def test_the_chain_for_single_rows_goes_over_both_stages(tmp_path: Path) -> None:
    """One sequence, then two, then one."""
    made = checkpoints.make("qwen3-tied", tmp_path, **SINGLE_ROW_SIZES)
    with ranked(made.folder, 1, 2, device="cuda", **WAYS["graphs"]) as rig:
        rig.step([New(0, prompt(9))], {0: 9})
        for _ in range(5):
            rig.step()
        rig.step([New(2, prompt(5, 2))], {0: 0, 2: 5})
        for _ in range(3):
            rig.step()
        assert error(rig, made, 0) < MAX_ERROR
        rig.step(released=[0])
        for _ in range(6):
            rig.step()
        assert error(rig, made, 2) < MAX_ERROR


def test_memory_is_measured_by_both(checkpoint: Make) -> None:
    sizes = {"block_size": 64, "num_blocks": 0, "gpu_memory_utilization": 0.3, "max_num_batched_tokens": 512}
    with ranked(checkpoint("llama").folder, 1, 2, device="cuda", attention_backend="auto", **sizes) as rig:
        assert rig.replica.limits.num_blocks > 1000
