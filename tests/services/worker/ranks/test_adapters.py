"""Adapters of a sharded model: each rank has its part of them. Two processes on the CPU, over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.worker.building.build import build_replica
from quire.shared.errors import InvalidArgument
from tests.services.worker.lora import peft_folders
from tests.services.worker.lora.peft_folders import (
    all_experts,
    bases,
    each_expert,
    embedding,
    head,
    whole_embedding,
    whole_head,
)
from tests.services.worker.models.test_logits import MAX_ERROR, Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import ranked
from tests.services.worker.rig import Rig


# Parts of fused layers, layers that are fused in the checkpoint, and recurrent ones.
@pytest.mark.parametrize(
    "family",
    [
        *("llama-biases-tied", "phi3-partial"),
        *(
            pytest.param(family, marks=pytest.mark.slow)
            for family in ("granite-hybrid", "falcon-h1-norms", "qwen3-next")
        ),
    ],
)
def test_logits_are_those_of_merged_weights(checkpoint: Make, family: str, tmp_path: Path) -> None:
    made = checkpoint(family)
    merged = peft_folders.save(made, tmp_path / "a", seed=1)
    with ranked(made.folder, lora={"a": str(merged.folder)}, block_size=16) as rig:
        rig.step([New(0, prompt(11, 1), adapter="a"), New(1, prompt(9, 2))], {0: 11, 1: 9})
        for _ in range(2):
            rig.step()
        assert error(rig, merged, 0) < MAX_ERROR
        assert error(rig, made, 1) < MAX_ERROR


# One weight for both and weights of their own, of a vocabulary that ranks cannot share evenly; parts of experts, or
# whole ones.
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        pytest.param("qwen3-tied", {}, marks=pytest.mark.slow, id="tied"),
        pytest.param("mixtral", {}, marks=pytest.mark.slow, id="parts of experts"),
        pytest.param("mixtral", {"expert_parallel": True}, id="whole experts"),
    ],
)
def test_of_embeddings_output_heads_and_experts(
    checkpoint: Make, family: str, settings: dict[str, bool], tmp_path: Path
) -> None:
    made, more = checkpoint(family), [bases, embedding, head]
    merged = peft_folders.save(made, tmp_path / "a", seed=1, more=[*more, each_expert])
    other = peft_folders.save(made, tmp_path / "b", seed=2, more=[*more, all_experts])
    with ranked(made.folder, lora={"a": str(merged.folder), "b": str(other.folder)}, **settings) as rig:
        news = [New(slot, prompt(9 + slot, slot), adapter=name) for slot, name in enumerate(("a", "", "b"))]
        rig.step(news, {0: 9, 1: 10, 2: 11})
        for _ in range(2):
            rig.step()
        for slot, of_slot in enumerate((merged, made, other)):
            assert error(rig, of_slot, slot) < MAX_ERROR


# One weight for both and weights of their own, of a vocabulary that ranks cannot share evenly.
@pytest.mark.parametrize("family", [pytest.param("qwen3-tied", marks=pytest.mark.slow), "llama"])
def test_of_whole_embeddings_and_output_heads(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Sharded by rows of the vocabulary."""
    made, names = checkpoint(family), ["embed_tokens", "lm_head"]
    whole = peft_folders.save(made, tmp_path / "a", seed=1, more=[whole_embedding, whole_head], modules_to_save=names)
    low = peft_folders.save(made, tmp_path / "b", seed=2, more=[embedding, head])
    with ranked(made.folder, lora={"a": str(whole.folder), "b": str(low.folder)}) as rig:
        news = [New(slot, prompt(9 + slot, slot), adapter=name) for slot, name in enumerate(("a", "", "b"))]
        rig.step(news, {0: 9, 1: 10, 2: 11})
        for _ in range(2):
            rig.step()
        for slot, of_slot in enumerate((whole, made, low)):
            assert error(rig, of_slot, slot) < MAX_ERROR


@pytest.mark.parametrize("field", ["lora_folders", "use_dora"])
def test_what_ranks_cannot_do_is_refused_by_name(checkpoint: Make, tmp_path: Path, field: str) -> None:
    made = checkpoint("qwen3-tied")
    folder = peft_folders.save(made, tmp_path / "a", seed=1, use_dora=True).folder
    adapters = {"lora_folders": [str(tmp_path)]} if field == "lora_folders" else {"lora": {"a": str(folder)}}
    with pytest.raises(InvalidArgument, match=f"{field}.* with tensor_parallel_size 2"):
        build_replica(Rig.settings(made.folder, tensor_parallel_size=2, **adapters))
