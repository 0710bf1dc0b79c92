"""After an update every family has, bit for bit, the logits of a fresh start with the new weights, including packed,
tied, fused, scaled, dequantized and taped ones."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.models.loading.weights import NewWeights
from quire.shared.errors import FailedPrecondition
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.layers.quantization import layouts as quantized
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
WEIGHTS = "model.safetensors"
DENSE = [
    "llama-biases-tied",
    "qwen3-tied",
    "gpt2",
    "opt",
    "granite-tied",
    "gemma3-tied",
    "glm4",
    "cohere2",
    "phi3-window",
]
MIXTURES = ["mixtral", "deepseek-v3", "gpt-oss", "granite-moe", "qwen2-moe", "llama4"]


def perturbed(folder: Path, target: Path) -> Path:
    """Writes the same model with every weight changed."""
    shutil.copytree(folder, target)
    generator = torch.Generator().manual_seed(5)
    tensors = load_file(target / WEIGHTS)
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.element_size() > 1:
            tensors[name] = (tensor.float() * (1 + 0.3 * torch.rand(tensor.shape, generator=generator))).to(tensor)
    save_file(tensors, target / WEIGHTS, {"format": "pt"})
    return target


def rows(rig: Rig) -> torch.Tensor:
    """Returns logits of a prompt in two chunks and of the following steps."""
    rig.end_epoch()
    rig.logits.clear()
    rig.step([New(0, PROMPT)], {0: 8})
    for count in (3, 1, 1):
        rig.step(counts={0: count})
    return torch.stack(rig.logits[0])


def check(folder: Path, other: Path, dtype: str) -> None:
    rig, fresh = (Rig(path, attention_backend="auto", dtype=dtype) for path in (folder, other))
    before, wanted = rows(rig), rows(fresh)
    assert not torch.equal(before, wanted)
    with torch.inference_mode():
        rig.replica.update_weights(NewWeights(other))
    assert torch.equal(rows(rig), wanted)
    assert rig.replica.orders.version == "1"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", [*DENSE, *MIXTURES])
def test_logits_are_those_of_a_fresh_start(checkpoint: Make, tmp_path: Path, family: str, dtype: str) -> None:
    folder = checkpoint(family).folder
    check(folder, perturbed(folder, tmp_path / "other"), dtype)


@pytest.mark.parametrize("layout", ["gptq", "awq", "ct-int8", "ct-w4-32"])
def test_quantized_weights_are_updated(tmp_path: Path, layout: str) -> None:
    made = quantized.make(quantized.LAYOUTS[layout], tmp_path / "first")
    check(made.folder, perturbed(made.folder, tmp_path / "other"), "bfloat16")


def test_expert_counts_continue(checkpoint: Make) -> None:
    folder = checkpoint("mixtral").folder
    rig = Rig(folder)
    rows(rig)
    before = {layer: list(load) for layer, load in rig.replica.experts.read_load().items()}
    assert all(map(sum, before.values()))
    with torch.inference_mode():
        rig.replica.update_weights(NewWeights(folder))
    assert {layer: list(load) for layer, load in rig.replica.experts.read_load().items()} == before


def test_weights_in_use_elsewhere_are_not_changed(checkpoint: Make) -> None:
    folder = checkpoint("stablelm").folder
    rig = Rig(folder)
    with torch.inference_mode(), pytest.raises(FailedPrecondition, match="transformers"):
        rig.replica.update_weights(NewWeights(folder))
    assert rig.replica.orders.version == "0"
