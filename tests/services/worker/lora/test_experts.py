"""Adapters of experts: logits equal those of a model with the merged weights in float32."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.building.build import build_replica
from quire.services.worker.lora.peft import peft_folder
from quire.shared.errors import InvalidArgument
from tests.kernels.cpu.closeness import needs_library
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.lora import peft_folders
from tests.services.worker.lora.merged import (
    check_on_the_tape,
    check_over_a_quantized_base,
    check_side_by_side,
)
from tests.services.worker.lora.peft_folders import all_experts, each_expert
from tests.services.worker.lora.test_embeddings import WEIGHTS, none
from tests.services.worker.models.test_logits import MAX_ERROR, Make, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig


# Other checkpoint names, a shared expert, expert groups.
@pytest.mark.parametrize("family", ["mixtral", "qwen3-moe-tied", "qwen2-moe", "deepseek-v3"])
def test_logits_are_those_of_merged_weights(checkpoint: Make, family: str, tmp_path: Path) -> None:
    """Runs separate and stacked adapters, also in the older PEFT layout, and a sequence without one in the same
    steps."""
    made = checkpoint(family)
    given = {
        "each": peft_folders.save(made, tmp_path / "each", seed=1, more=[each_expert]),
        "all": peft_folders.save(made, tmp_path / "all", seed=2, rank=3, more=[all_experts], wanted=none),
        "older": peft_folders.save(
            made, tmp_path / "older", seed=3, more=[partial(all_experts, outputs_first=True)], wanted=none
        ),
        "": made,
    }
    check_side_by_side(made, given)


@pytest.mark.skipif(**needs_library)
def test_on_the_tape_and_while_it_runs(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("qwen3-moe-tied")

    def new(seed: int) -> Checkpoint:
        experts = (each_expert, all_experts)[seed]
        return peft_folders.save(made, tmp_path / str(seed), seed=seed, rank=seed + 3, more=[experts])

    check_on_the_tape(made, tmp_path, new, (0, 1))


def test_parameters_that_have_inputs_first(checkpoint: Make, tmp_path: Path) -> None:
    """Includes experts whose inputs are scaled by their routing weight."""
    made = checkpoint("llama4")
    given = [
        peft_folders.save(made, tmp_path / "new", seed=1, more=[all_experts]),
        peft_folders.save(made, tmp_path / "old", seed=2, more=[partial(all_experts, outputs_first=True)]),
    ]
    rig = Rig(made.folder, lora={merged.folder.name: str(merged.folder) for merged in given})
    rig.step(
        [New(0, prompt(9), adapter="new"), New(1, prompt(9, 1), adapter="old"), New(2, prompt(9, 2))],
        {0: 9, 1: 9, 2: 9},
    )
    rig.step()
    for slot, merged in enumerate((*given, made)):
        assert error(rig, merged, slot) < MAX_ERROR


def test_over_quantized_experts(tmp_path: Path) -> None:
    new = partial(peft_folders.save, seed=1, more=[each_expert])
    check_over_a_quantized_base("awq", tmp_path, new, family="mixtral", hidden_size=128)


def square(tmp_path: Path) -> Checkpoint:
    """Builds a checkpoint whose gate and up projections have as many outputs as inputs."""
    return checkpoints.make("qwen3-moe-tied", tmp_path / "square", moe_intermediate_size=24)


@pytest.mark.parametrize(("version", "outputs_first"), [("0.18.1", True), ("0.19.0", False), ("1.0.dev0", False)])
def test_square_weights_are_read_as_their_version_has_them(tmp_path: Path, version: str, outputs_first: bool) -> None:
    made = square(tmp_path)
    more = [partial(all_experts, outputs_first=outputs_first)]
    merged = peft_folders.save(made, tmp_path / "a", seed=1, more=more, peft_version=version)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(9), adapter="a")], {0: 9})
    assert error(rig, merged, 0) < MAX_ERROR


def test_square_weights_without_a_version_are_refused(tmp_path: Path) -> None:
    made = square(tmp_path)
    folder = peft_folders.save(made, tmp_path / "a", seed=1, more=[all_experts]).folder
    with pytest.raises(InvalidArgument, match=r"peft_version is '': versions differ in square weights like those of"):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_ranks_and_scales_of_all_experts(checkpoint: Make, tmp_path: Path) -> None:
    """Uses PEFT's format for merged gate and up adapters."""
    made = checkpoint("mixtral")
    patterns = {"rank_pattern": {r".*\.gate_up_proj": 8}, "alpha_pattern": {r".*\.gate_up_proj": 12.0}}

    def doubled(draft: peft_folders.Draft) -> None:
        """Doubles ranks and alphas of gates and ups, which keeps their scale."""
        all_experts(draft)
        for name in [name for name in draft.tensors if ".experts.base_layer." in name]:
            tensor, experts = draft.tensors[name], 4
            if "lora_A" in name:
                wide = tensor.unflatten(0, (experts, -1))
                draft.tensors[name] = torch.cat([wide, torch.zeros_like(wide)], dim=1).flatten(0, 1)
            else:
                draft.tensors[name] = torch.cat([tensor, torch.ones_like(tensor)], dim=1)

    merged = peft_folders.save(made, tmp_path / "a", seed=1, more=[doubled], wanted=none, **patterns)
    rig = Rig(made.folder, lora={"a": str(merged.folder)})
    rig.step([New(0, prompt(9), adapter="a")], {0: 9})
    assert error(rig, merged, 0) < MAX_ERROR


@pytest.mark.parametrize(
    ("name", "shape", "text"),
    [
        (
            "mlp.experts.lora_B.weight",
            (50, 16),
            r"is for weights of shape \[50, 88\], the model's have gate_up_proj",
        ),
        ("mlp.experts.lora_A.weight", (15, 88), r"experts has shapes \[15, 88\] and \[48, 16\] for down_proj, r is 4"),
        ("mlp.experts.extra.weight", (4, 4), "holds .*extra.weight: only A, B and DoRA's"),
        ("block_sparse_moe.experts.9.w1.lora_A.weight", (4, 48), "has no .*experts.9.w1.lora_B.weight"),
    ],
)
def test_incompatible_adapters_are_refused_by_name(
    checkpoint: Make, tmp_path: Path, name: str, shape: tuple[int, ...], text: str
) -> None:
    made = checkpoint("mixtral")
    folder = peft_folders.save(made, tmp_path / "a", seed=1, more=[all_experts]).folder
    changed = load_file(folder / WEIGHTS) | {f"base_model.model.model.layers.1.{name}": torch.zeros(shape)}
    save_file(changed, folder / WEIGHTS)
    with pytest.raises(InvalidArgument, match=text):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_two_adapters_of_one_expert_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("mixtral")
    folder = peft_folders.save(made, tmp_path / "a", seed=1, more=[all_experts, each_expert]).folder
    with pytest.raises(InvalidArgument, match=r"experts.0.w1 has an adapter of its own and one of all experts"):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_experts_in_dora_are_refused(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("mixtral")
    folder = peft_folders.save(made, tmp_path / "a", seed=1, wanted=none, more=[each_expert], use_dora=True).folder
    tensors = load_file(folder / WEIGHTS)
    for name in [name for name in tensors if name.endswith("lora_B.weight")]:
        size = len(tensors[name])
        tensors[name.replace("lora_B.weight", "lora_magnitude_vector")] = torch.ones(size)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(InvalidArgument, match=r"use_dora is True, which experts do not support: .*experts.0.w1"):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


@pytest.mark.parametrize("family", ["gpt-oss", "granite-moe"])
def test_unsupported_expert_layouts_are_refused(checkpoint: Make, tmp_path: Path, family: str) -> None:
    made = checkpoint(family)
    folder = peft_folders.save(checkpoint("mixtral"), tmp_path / "a", seed=1, wanted=none, more=[all_experts]).folder
    with pytest.raises(InvalidArgument, match=r"mlp.experts is not a linear layer, embedding or experts of this model"):
        build_replica(Rig.settings(made.folder, lora={"a": str(folder)}))


def test_the_digest_depends_on_expert_weights(checkpoint: Make, tmp_path: Path) -> None:
    made = checkpoint("mixtral")
    folders = [
        peft_folders.save(made, tmp_path / str(i), seed=seed, wanted=none, more=[all_experts], lora_alpha=alpha).folder
        for i, (seed, alpha) in enumerate([(1, 6.0), (1, 6.0), (2, 6.0), (1, 7.0)])
    ]
    digests = [peft_folder.read("a", folder).digest() for folder in folders]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3
