"""Adapters that replace embeddings and output heads (modules_to_save): logits equal those of a model with the replaced
weights, in float32 unless stated otherwise."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.building.build import build_replica
from quire.services.worker.kv import kv_memory
from quire.services.worker.lora.peft import peft_folder
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
from tests.services.worker.lora.peft_folders import embedding, head, whole_embedding, whole_head
from tests.services.worker.lora.test_embeddings import WEIGHTS, none
from tests.services.worker.lora.test_loading import load, rig_of
from tests.services.worker.models.test_logits import MAX_ERROR, Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig
from tests.services.worker.spec_decode import test_mtp as mtp
from tests.spec_decode.pair import Pair, build

BOTH = ["embed_tokens", "lm_head"]
ROOM = {"lora_modules_to_save": BOTH}


def save(made: Checkpoint, folder: Path, *, seed: int = 1, **more: object) -> Checkpoint:
    """Saves an adapter that replaces both, with low ranks elsewhere."""
    given = {"more": [whole_embedding, whole_head], "modules_to_save": BOTH, **more}
    return peft_folders.save(made, folder, seed=seed, **given)


# Separate and tied weights, scaled embeddings, scaled logits, both scaled, experts.
@pytest.mark.parametrize("family", ["llama", "qwen3-tied", "gemma3-tied", "cohere", "granite-tied", "mixtral"])
def test_logits_are_those_of_the_saved_weights(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Replaces both, or one with a low rank of the other; another sequence has no adapter, all in the same steps."""
    made = checkpoint(family)
    both = save(made, tmp_path / "both")
    vectors = save(
        made, tmp_path / "vectors", more=[whole_embedding, head], modules_to_save=["embed_tokens"], wanted=none
    )
    logits = save(made, tmp_path / "logits", more=[embedding, whole_head], modules_to_save=["lm_head"], wanted=none)
    check_side_by_side(made, {"both": both, "vectors": vectors, "logits": logits, "": made})


@pytest.mark.skipif(**needs_library)
def test_on_the_tape_and_while_it_runs(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")

    def new(seed: int) -> Checkpoint:
        return save(made, tmp_path / str(seed), seed=seed, rank=seed + 3)

    check_on_the_tape(made, tmp_path, new, (1, 2), **ROOM)


def test_a_low_rank_adapter_reuses_the_number_of_a_whole_one(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-tied")
    rig = rig_of(made, tmp_path, max_loras=1, **ROOM)
    for slot, merged in enumerate((save(made, tmp_path / "whole"), peft_folders.save(made, tmp_path / "low", seed=2))):
        adapter = load(rig, merged)
        rig.step([New(slot, prompt(9), adapter="a")], {slot: 9})
        rig.step()
        assert error(rig, merged, slot) < MAX_ERROR
        rig.step(released=[slot])
        with torch.inference_mode():
            rig.replica.adapters.remove(adapter)


@pytest.mark.skipif(**needs_library)
def test_bfloat16_logits_are_as_accurate_as_the_models_own(checkpoint: Make, tmp_path: Path) -> None:
    """The trained weight replaces the model's own; it is not added to that one's product."""
    made = checkpoint("llama")
    merged = save(made, tmp_path / "a", wanted=none)
    rig = Rig(made.folder, lora={"a": str(merged.folder)}, dtype="bfloat16", attention_backend="auto", block_size=16)
    rig.step([New(0, prompt(9), adapter="a"), New(1, prompt(9))], {0: 9, 1: 9})
    rig.step()
    assert error(rig, merged, 0) < 2 * max(error(rig, made, 1), 0.01)


def test_over_a_quantized_base(tmp_path: Path) -> None:
    check_over_a_quantized_base("gptq", tmp_path, save)


def test_log_probabilities_of_prompts(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    merged = save(made, tmp_path / "a")
    rig, prompts = Rig(made.folder, lora={"a": str(merged.folder)}), [prompt(12, seed) for seed in range(3)]
    sampling = asking(prompt_logprobs=2)
    news = [New(slot, tokens, sampling=sampling, adapter="a" * (slot != 1)) for slot, tokens in enumerate(prompts)]
    rig.step(news, {0: 12, 1: 12, 2: 12})
    positions = found(rig)
    for slot, tokens in enumerate(prompts):
        check(positions[11 * slot : 11 * (slot + 1)], made if slot == 1 else merged, tokens, 1, 2)


def test_drafts_of_the_models_own_weights_are_verified_with_the_saved_ones(tmp_path: Path) -> None:
    made = mtp.forgetful(tmp_path / "base", mtp.OF_TOKEN)
    merged = save(made, tmp_path / "a", wanted=none)
    lora = {"a": str(merged.folder)}
    run = Pair(build(mtp.MTP, made.folder, lora=lora, num_blocks=200, max_num_seqs=4, attention_backend="reference"))
    with_one, without = run.ask(prompt(20, 1), 15, (), adapter="a"), run.ask(prompt(20, 3), 15, ())
    run.run()
    assert with_one.tokens == greedy(merged, with_one.prompt, 15)
    assert with_one.tokens != greedy(made, with_one.prompt, 15)
    assert without.tokens == greedy(made, without.prompt, 15)


def test_saved_weights_are_part_of_the_digest(checkpoint: Make, tmp_path: Path) -> None:
    """The digest depends on every element, and on the module's name."""
    made = checkpoint("llama")
    folder = save(made, tmp_path / "a").folder
    tensors = load_file(folder / WEIGHTS)
    first = peft_folder.read("a", folder).digest()
    tensors["base_model.model.lm_head.weight"][7, 3] += 1
    save_file(tensors, folder / WEIGHTS)
    second = peft_folder.read("a", folder).digest()
    names = ("base_model.model.lm_head.weight", "base_model.model.model.embed_tokens.weight")
    tensors |= {names[0]: tensors[names[1]], names[1]: tensors[names[0]]}
    save_file(tensors, folder / WEIGHTS)
    assert len({first, second, peft_folder.read("a", folder).digest()}) == 3


REJECTED = {
    "added tokens": (
        {},
        {"lm_head": torch.ones(219, 48)},
        "modules_to_save: lm_head has 219 tokens, the model's has 211: added tokens are not served",
    ),
    "another width": (
        {},
        {"model.embed_tokens": torch.ones(211, 40)},
        r"modules_to_save: model.embed_tokens has shape \[211, 40\], the model's has \[211, 48\]",
    ),
    "fewer tokens": (
        {},
        {"lm_head": torch.ones(200, 48)},
        r"modules_to_save: lm_head has shape \[200, 48\], the model's has \[211, 48\]",
    ),
    "codes": (
        {},
        {"lm_head": torch.ones(211, 48, dtype=torch.int8)},
        r"modules_to_save: lm_head is \[211, 48\] of torch.int8, a matrix of floats is needed",
    ),
    "a norm": (
        {"modules_to_save": [*BOTH, "norm"]},
        {"model.norm": torch.ones(48)},
        r"modules_to_save: model.norm is \[48\] of torch.float32, a matrix of floats is needed",
    ),
    "another layer": (
        {"modules_to_save": [*BOTH, "layers.0.mlp.up_proj"], "wanted": none},
        {"model.layers.0.mlp.up_proj": torch.ones(96, 48)},
        "model.layers.0.mlp.up_proj cannot be served whole, embeddings and output heads can: lm_head, model.embed",
    ),
    "a classifier": (
        {"modules_to_save": [*BOTH, "classifier", "score"]},
        {"score": torch.ones(3, 48)},
        "modules_to_save: score cannot be served whole",
    ),
    "nothing of that name": (
        {"modules_to_save": ["embed_out", *BOTH]},
        {},
        r"modules_to_save has 'embed_out', .* has no base_model.model.embed_out.weight",
    ),
    "whole and of low rank": (
        {"more": [whole_embedding, whole_head, head]},
        {},
        "modules_to_save: lm_head is in the file whole, and of low rank",
    ),
    "no list": ({"modules_to_save": "lm_head"}, {}, "modules_to_save is 'lm_head', a list of at most 1000 names is"),
    "not named": ({"modules_to_save": ["lm_head"]}, {}, "holds base_model.model.model.embed_tokens.weight: only A, B"),
    "a bias": ({}, {"lm_head.bias": torch.ones(211)}, "holds base_model.model.lm_head.bias"),
}


@pytest.mark.parametrize("what", REJECTED)
def test_unsupported_adapters_are_refused_by_name(checkpoint: Make, tmp_path: Path, what: str) -> None:
    made = checkpoint("llama")
    config, tensors, text = REJECTED[what]
    folder = save(made, tmp_path / "a", **config).folder
    names = {
        f"base_model.model.{name if name.endswith('bias') else name + '.weight'}": t for name, t in tensors.items()
    }
    save_file(load_file(folder / WEIGHTS) | names, folder / WEIGHTS)
    with pytest.raises(InvalidArgument, match=text):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_modules_that_peft_adds_may_be_missing(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    folder = save(made, tmp_path / "a", modules_to_save=[*BOTH, "classifier", "score"]).folder
    assert set(peft_folder.read("a", folder).saved) == {"model.embed_tokens", "lm_head"}


def test_loading_without_reserved_memory_is_refused_with_the_size(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    merged, low = save(made, tmp_path / "a"), peft_folders.save(made, tmp_path / "low", seed=2)
    rig = rig_of(made, tmp_path, lora_modules_to_save=["lm_head"])
    text = (
        r"model.embed_tokens takes 40,512 bytes for each of 2 adapters \(max_loras\), .* lora_modules_to_save names it"
    )
    with pytest.raises(InvalidArgument, match=text):
        load(rig, merged)
    load(rig, low)
    rig.step([New(0, prompt(8), adapter="a")], {0: 8})
    rig.step()
    assert error(rig, low, 0) < MAX_ERROR


def test_memory_is_reserved_for_each_adapter(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("llama")
    one = (211 * 48 + 48 * 48) * 4  # float32 weight, and an identity matrix
    assert rig_of(made, tmp_path, max_loras=3).replica.adapters.reserved_bytes == 0
    rig = rig_of(made, tmp_path, max_loras=3, **ROOM)
    assert rig.replica.adapters.reserved_bytes == 3 * 2 * one + one
    load(rig, save(made, tmp_path / "a"))
    assert rig.replica.adapters.reserved_bytes == 2 * 2 * one + one
    at_the_start = Rig(made.folder, lora={"a": str(tmp_path / "a")})
    assert at_the_start.replica.adapters.reserved_bytes == 0


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"lora_modules_to_save": ["norm"], "lora_folders": ["/"]},
            "'norm' is not an embedding or output head of this model",
        ),
        ({"lora_modules_to_save": ["lm_head"]}, "lora_modules_to_save reserves memory for adapters of lora_folders"),
    ],
)
def test_reserving_for_unknown_layers_is_refused(checkpoint: Make, settings: dict[str, object], text: str) -> None:
    made = checkpoint("llama")
    with pytest.raises(InvalidArgument, match=text):
        build_replica(Rig.settings(made.folder, **settings))


def test_reserving_more_than_the_memory_is_refused_with_the_size(
    checkpoint: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kv_memory, "free_host_bytes", lambda: 100_000)
    text = r"3 adapters \(max_loras\) may use 348,096 bytes, but only 100,000 are free after loading the weights"
    with pytest.raises(InvalidArgument, match=text):
        rig_of(checkpoint("llama"), tmp_path, max_loras=3, **ROOM)
    rig_of(checkpoint("llama"), tmp_path, max_loras=3)
