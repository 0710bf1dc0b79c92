"""Adapters inside CUDA graphs, on a GPU machine: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from quire.services.worker.lora.peft import peft_folder
from quire.shared.models.adapter_ids import AdapterId
from tests.services.worker import checkpoints
from tests.services.worker.lora import peft_folders
from tests.services.worker.models.test_logits import Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import (
    chunk_graphs_of,
    decode_graphs_of,
)
from tests.services.worker.rig import Rig
from tests.services.worker.test_cuda import MAX_ERROR, SAMPLINGS, SINGLE_ROW_SIZES, WAYS, cuda_rig

pytestmark = pytest.mark.gpu

RANKS = {"a": 8, "b": 64, "c": 5}


@torch.inference_mode()
def test_texts_in_graphs_are_those_of_steps_launched_kernel_by_kernel(checkpoint: Make, tmp_path: Path) -> None:
    """Runs chunks and decodes of three adapters and of none, including recorded sampling."""
    made = checkpoint("llama")
    lora = {
        name: str(peft_folders.save(made, tmp_path / name, seed=rank, rank=rank).folder) for name, rank in RANKS.items()
    }
    settings = {"record_logits": False, "max_num_seqs": 16, "num_blocks": 600, "lora": lora}
    rigs = [cuda_rig(made, **settings, **WAYS[way]) for way in ("chunks in graphs", "eager")]
    for slot in range(12):
        sampling, count, name = SAMPLINGS[slot % 2], 7 * slot + 3, ("", "a", "b", "c")[slot % 4]
        for rig in rigs:
            rig.step([New(slot, prompt(count, slot), sampling=sampling, adapter=name)], {slot: min(count, 20)})
            if count > 20:
                rig.step(counts={slot: count - 20})
            rig.step()
    for rig in rigs:
        for _ in range(20):
            rig.step()
        rig.step(released=[slot for slot in range(12) if slot % 4])
        for _ in range(5):
            rig.step()
    assert [rigs[0].tokens(slot) for slot in (0, 4, 8)] == [rigs[1].tokens(slot) for slot in (0, 4, 8)]
    assert {adapted for *_, adapted in decode_graphs_of(rigs[0].replica)._graphs} == {False, True}
    assert {adapted for _, adapted in chunk_graphs_of(rigs[0].replica)._steps} == {False, True}


def load(rig: Rig, folder: Path) -> AdapterId:
    read = peft_folder.read("x", folder)
    with torch.inference_mode():
        rig.replica.adapters.add(read, read.digest())
    return AdapterId("x", read.digest())


@pytest.mark.parametrize("way", WAYS)
def test_adapters_come_and_go_between_replays(checkpoint: Make, tmp_path: Path, way: str) -> None:
    made = checkpoint("qwen3-tied")
    rig = cuda_rig(made, lora_folders=[str(tmp_path)], max_loras=2, max_lora_rank=32, **WAYS[way])
    for seed, rank in enumerate((4, 20, 32)):
        more = [peft_folders.bases, peft_folders.embedding, peft_folders.head]
        merged = peft_folders.save(made, tmp_path / str(seed), seed=seed, rank=rank, more=more)
        adapter = load(rig, merged.folder)
        rig.logits.clear()
        rig.step([New(0, prompt(9, 1), adapter="x"), New(1, prompt(9, 1))], {0: 9, 1: 9})
        for _ in range(4):
            rig.step()
        assert error(rig, merged, 0) < MAX_ERROR
        assert error(rig, made, 1) < MAX_ERROR
        rig.step(released=[0, 1])
        with torch.inference_mode():
            rig.replica.adapters.remove(adapter)


@pytest.mark.parametrize("way", WAYS)
def test_whole_embeddings_and_output_heads(tmp_path: Path, way: str) -> None:
    """Runs in the single-row program, then with another adapter and a sequence without one."""
    made, names = checkpoints.make("qwen3-tied", tmp_path, **SINGLE_ROW_SIZES), ["embed_tokens", "lm_head"]
    more = [peft_folders.whole_embedding, peft_folders.whole_head]
    whole = peft_folders.save(made, tmp_path / "whole", seed=1, more=more, modules_to_save=names)
    low = peft_folders.save(made, tmp_path / "low", seed=2, more=[peft_folders.embedding, peft_folders.head])
    rig = cuda_rig(made, lora={"whole": str(whole.folder), "low": str(low.folder)}, **WAYS[way])
    rig.step([New(0, prompt(9), adapter="whole")], {0: 9})
    for _ in range(3):
        rig.step()
    rig.step([New(1, prompt(7, 1)), New(2, prompt(8, 2), adapter="low")], {0: 1, 1: 7, 2: 8})
    rig.step()
    for slot, merged in enumerate((whole, made, low)):
        assert error(rig, merged, slot) < MAX_ERROR


@pytest.mark.parametrize("way", WAYS)
def test_experts(tmp_path: Path, way: str) -> None:
    """Runs in the single-row program, then with another adapter and a sequence without one."""
    made = checkpoints.make("qwen3-moe-tied", tmp_path, **SINGLE_ROW_SIZES)
    each = peft_folders.save(made, tmp_path / "each", seed=1, more=[peft_folders.each_expert])
    everyone = peft_folders.save(made, tmp_path / "all", seed=2, rank=9, more=[peft_folders.all_experts])
    rig = cuda_rig(made, lora={"each": str(each.folder), "all": str(everyone.folder)}, **WAYS[way])
    rig.step([New(0, prompt(9), adapter="each")], {0: 9})
    for _ in range(3):
        rig.step()
    rig.step([New(1, prompt(7, 1)), New(2, prompt(8, 2), adapter="all")], {0: 1, 1: 7, 2: 8})
    rig.step()
    for slot, merged in enumerate((each, made, everyone)):
        assert error(rig, merged, slot) < MAX_ERROR


@pytest.mark.parametrize("rank", [8, 200])
def test_the_single_row_program(tmp_path: Path, rank: int) -> None:
    """Adapts all linear layers, and one part of a fused one; then runs a sequence without an adapter."""
    made = checkpoints.make("qwen3-tied", tmp_path, **SINGLE_ROW_SIZES)
    whole = peft_folders.save(made, tmp_path / "whole", seed=1, rank=rank)
    some = peft_folders.save(made, tmp_path / "some", seed=2, wanted=lambda name: name.endswith("up_proj"))
    lora = {"whole": str(whole.folder), "some": str(some.folder)}
    rig = cuda_rig(made, lora=lora, **WAYS["graphs"])
    for slot, (name, merged) in enumerate({"whole": whole, "some": some, "": made}.items()):
        rig.step([New(slot, prompt(9), adapter=name)], {slot: 9}, released=[slot - 1] if slot else [])
        for _ in range(6):
            rig.step()
        assert error(rig, merged, slot) < MAX_ERROR


@pytest.mark.parametrize("way", WAYS)
def test_dora(tmp_path: Path, way: str) -> None:
    """Runs alone in the single-row program, then with a sequence without an adapter."""
    made = checkpoints.make("llama-biases-tied", tmp_path, **SINGLE_ROW_SIZES)
    merged = peft_folders.save(made, tmp_path / "a", seed=1, use_dora=True)
    rig = cuda_rig(made, lora={"a": str(merged.folder)}, **WAYS[way])
    rig.step([New(0, prompt(9), adapter="a")], {0: 9})
    for _ in range(3):
        rig.step()
    rig.step([New(1, prompt(7, 1))], {0: 1, 1: 7})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR
    assert error(rig, made, 1) < MAX_ERROR


def test_a_base_in_8_bits(tmp_path: Path) -> None:
    """Adapters stay in the model's dtype and add the same as without quantization, also in graphs."""
    made = checkpoints.make("qwen3-tied", tmp_path, **SINGLE_ROW_SIZES)
    merged = peft_folders.save(made, tmp_path / "a", seed=1)
    rigs = [
        cuda_rig(made, quantization="fp8", lora={"a": str(merged.folder)}, **WAYS[way]) for way in ("graphs", "eager")
    ]
    for rig in rigs:
        rig.step([New(0, prompt(9), adapter="a"), New(1, prompt(20, 2))], {0: 9, 1: 20})
        for _ in range(4):
            rig.step()
        tokens, rows = rig.tokens(0), torch.stack(rig.logits[0])
        want = merged.logits(tokens)[len(tokens) - len(rows) - 1 : -1]
        assert float((rows - want).norm() / want.norm()) < 0.25
