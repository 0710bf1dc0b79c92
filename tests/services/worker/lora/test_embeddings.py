"""Adapters of embeddings and output heads: logits equal those of a model with the merged weights in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.building.build import build_replica
from quire.shared.errors import InvalidArgument
from tests.kernels.cpu.closeness import needs_library
from tests.kv_groups.models import greedy
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.heads.test_prompt_logprobs import asking, check, found
from tests.services.worker.lora import peft_folders
from tests.services.worker.lora.merged import (
    check_on_the_tape,
    check_over_a_quantized_base,
    check_side_by_side,
)
from tests.services.worker.lora.peft_folders import bases, embedding, head
from tests.services.worker.lora.test_loading import load, rig_of
from tests.services.worker.models.test_logits import MAX_ERROR, Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig
from tests.services.worker.spec_decode import test_mtp as mtp
from tests.spec_decode.pair import Pair, build

WEIGHTS = "adapter_model.safetensors"


def none(_: str) -> bool:
    return False


# Separate and tied weights, scaled embeddings, scaled logits, both scaled, experts.
@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gemma3-tied", "cohere", "granite-tied", "mixtral"])
def test_logits_are_those_of_merged_weights(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Adapts both, or one of them; another sequence has no adapter, all in the same steps."""
    made = checkpoint(family)
    both = peft_folders.save(made, tmp_path / "both", seed=1, more=[embedding, head])
    vectors = peft_folders.save(made, tmp_path / "vectors", seed=2, rank=7, more=[embedding], wanted=none)
    logits = peft_folders.save(made, tmp_path / "logits", seed=3, rank=2, more=[head], wanted=none)
    given = {"both": both, "vectors": vectors, "logits": logits, "": made}
    check_side_by_side(made, given)


@pytest.mark.skipif(**needs_library)
def test_on_the_tape_and_while_it_runs(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")

    def new(seed: int) -> Checkpoint:
        return peft_folders.save(made, tmp_path / str(seed), seed=seed, rank=seed + 3, more=[bases, embedding, head])

    check_on_the_tape(made, tmp_path, new, (1, 2))


def test_over_a_quantized_base(tmp_path: Path) -> None:
    new = partial(peft_folders.save, seed=1, more=[bases, embedding, head])
    check_over_a_quantized_base("gptq", tmp_path, new)


def test_an_output_head_in_dora(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    merged = peft_folders.save(made, tmp_path / "a", seed=1, wanted=none, more=[head], use_dora=True)
    path = merged.folder / WEIGHTS
    magnitude = torch.rand(211) + 0.5
    save_file(load_file(path) | {"base_model.model.lm_head.lora_magnitude_vector": magnitude}, path)
    weight = merged.model.lm_head.weight.data
    weight *= (magnitude / weight.norm(dim=1))[:, None]
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(9), adapter="a")], {0: 9})
    rig.step()
    assert error(rig, merged, 0) < MAX_ERROR


def test_log_probabilities_of_prompts(checkpoint: Make, tmp_path: Path) -> None:
    """The output head reads prompt rows of several sequences besides the sampling rows."""
    made = checkpoint("llama")
    merged = peft_folders.save(made, tmp_path / "a", seed=1, more=[embedding, head])
    rig, prompts = Rig(made.folder, lora={"a": str(merged.folder)}), [prompt(12, seed) for seed in range(3)]
    sampling = asking(prompt_logprobs=2)
    news = [New(slot, tokens, sampling=sampling, adapter="a" * (slot != 1)) for slot, tokens in enumerate(prompts)]
    rig.step(news, {0: 12, 1: 12, 2: 12})
    positions = found(rig)
    for slot, tokens in enumerate(prompts):
        check(positions[11 * slot : 11 * (slot + 1)], made if slot == 1 else merged, tokens, 1, 2)
    assert rig.last_result.prompt_logprobs.slots == np.array([0, 1, 2], dtype=np.uint32).tobytes()


@pytest.mark.parametrize("path", ["tape", "reference"])
def test_drafts_beside_adapters(tmp_path: Path, path: str) -> None:
    """A drafting layer uses the base embeddings and output head; its drafts are verified with the adapter."""
    made = mtp.forgetful(tmp_path / "base", mtp.OF_TOKEN)
    merged = peft_folders.save(made, tmp_path / "a", seed=1, rank=2, wanted=none, more=[embedding, head])
    backend = {"attention_backend": "reference"} if path == "reference" else {}
    lora = {"a": str(merged.folder)}
    run = Pair(build(mtp.MTP, made.folder, lora=lora, num_blocks=200, max_num_seqs=4, block_size=16, **backend))
    with_one = [run.ask(prompt(20, seed), 15, (), adapter="a") for seed in (1, 2)]
    without = run.ask(prompt(20, 3), 15, ())
    run.run()
    for asked in with_one:
        assert asked.tokens == greedy(merged, asked.prompt, 15)
        assert asked.tokens != greedy(made, asked.prompt, 15)
    assert without.tokens == greedy(made, without.prompt, 15)
    assert run.core.counts.drafts.accepted_tokens > 0


def changed(folder: Path, **tensors: torch.Tensor) -> Path:
    """Saves a copy of the adapter with other `tensors`, whose names have double underscores for dots."""
    names = {f"base_model.model.{name.replace('__', '.')}": tensor for name, tensor in tensors.items()}
    save_file(load_file(folder / WEIGHTS) | names, folder / WEIGHTS)
    return folder


REJECTED = {
    "another base": (
        {"lm_head__base_layer__weight": torch.ones(211, 48)},
        "lm_head.base_layer.weight is not the model's",
    ),
    "one row is another": ({}, "model.embed_tokens.base_layer.weight is not the model's own"),
    "more tokens": (
        {"model__embed_tokens__base_layer__weight": torch.ones(219, 48)},
        r"embed_tokens.base_layer.weight has shape \[219, 48\], the model's \[211, 48\]",
    ),
    "a whole one": ({"lm_head__weight": torch.ones(211, 48)}, "holds base_model.model.lm_head.weight: only A, B"),
    "of another vocabulary": (
        {"model__embed_tokens__lora_embedding_A": torch.ones(4, 219)},
        r"embed_tokens is for a layer of shape \[48, 219\], the model's has \[48, 211\]",
    ),
    "half": (
        {"model__wte__lora_embedding_A": torch.ones(4, 211)},
        "has no .*wte.lora_embedding_B",
    ),
}


@pytest.mark.parametrize("what", REJECTED)
def test_incompatible_adapters_are_refused_by_name(checkpoint: Make, tmp_path: Path, what: str) -> None:
    made = checkpoint("llama")
    tensors, text = REJECTED[what]
    folder = peft_folders.save(made, tmp_path / "a", seed=1, wanted=none, more=[bases, embedding, head]).folder
    if what == "one row is another":
        table = made.model.model.embed_tokens.weight.data.clone()
        table[200] = table[7]
        tensors = {"model__embed_tokens__base_layer__weight": table}
    changed(folder, **tensors)
    with pytest.raises(InvalidArgument, match=text):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_loading_an_adapter_of_another_base_leaves_no_trace(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    right = peft_folders.save(made, tmp_path / "right", seed=1, more=[bases, embedding, head])
    wrong = peft_folders.save(made, tmp_path / "wrong", seed=2, more=[bases, embedding, head])
    changed(wrong.folder, lm_head__base_layer__weight=torch.ones(211, 48))
    rig = rig_of(made, tmp_path, max_loras=1)
    with pytest.raises(InvalidArgument, match=r"lm_head.base_layer.weight is not the model's own"):
        load(rig, wrong)
    load(rig, right)
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    assert error(rig, right, 0) < MAX_ERROR


def test_dora_embeddings_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    folder = peft_folders.save(made, tmp_path / "a", seed=1, wanted=none, more=[embedding], use_dora=True).folder
    with pytest.raises(InvalidArgument, match=r"use_dora is True, which embeddings cannot have: model.embed_tokens"):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))
