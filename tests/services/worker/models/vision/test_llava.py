"""LLaVA's vision part computes what transformers' does, from its own files of either age."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from quire import kernels
from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.loading.loader import Loader
from quire.services.worker.models.vision.llava import LlavaVision, read_llava
from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import CLIP_MEAN, CLIP_STD
from quire.shared.media.processor import Normalization

TEXT_SIZE = 48
TOWERS: dict[str, dict[str, Any]] = {
    "clip": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7, "projection_dim": 16},
    "siglip": {"model_type": "siglip_vision_model", "image_size": 24, "patch_size": 8, "vision_use_head": False},
    "siglip-head-72": {
        "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8,
        "hidden_size": 144, "num_attention_heads": 2,
    },
}  # fmt: skip


def llava(tower: str, **changes: Any) -> transformers.LlavaForConditionalGeneration:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = transformers.LlavaConfig(
        vision_config={**sizes, **TOWERS[tower]},
        text_config={
            "model_type": "qwen3", "hidden_size": TEXT_SIZE, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
        },
        image_token_id=99,
        **{"vision_feature_select_strategy": "default" if tower == "clip" else "full", **changes},
    )  # fmt: skip
    torch.manual_seed(7)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # norms and biases, too
    return model


def saved(model: transformers.LlavaForConditionalGeneration, folder: Path, *, old_names: bool) -> Path:
    model.save_pretrained(folder)
    if old_names:
        tensors = load_file(folder / "model.safetensors")
        renamed = {_old(name.removeprefix("model.")): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def _old(name: str) -> str:
    plain = name.removeprefix("vision_tower.").removeprefix("vision_model.")
    return f"vision_tower.vision_model.{plain}" if name.startswith("vision_tower.") else name


def opened(folder: Path) -> LlavaVision:
    config = transformers.AutoConfig.from_pretrained(folder).to_dict()
    file = ConfigFile(config)
    vision = file.section("vision_config")
    assert vision is not None
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"))
    found = LlavaVision(read_llava(file, vision, TEXT_SIZE), place, Normalization(CLIP_MEAN, CLIP_STD))
    Loader("auto", 0).load(found, folder, is_on_other_stage=lambda _: True)
    return found


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("tower", TOWERS)
def test_embeddings_are_those_of_transformers(tower: str, old_names: bool, tmp_path: Path) -> None:
    reference = llava(tower)
    ours = opened(saved(reference, tmp_path, old_names=old_names))
    side = TOWERS[tower]["image_size"]
    for num_pictures in (1, 3):
        pixels = torch.randn(num_pictures, 3, side, side)
        with torch.no_grad():
            expected = torch.stack(list(reference.get_image_features(pixels, return_dict=True).pooler_output))
        found = ours(pixels)
        assert found.shape == (num_pictures, ours.config.num_embeddings, TEXT_SIZE)
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("layer", [-1, -2, -4, 3])
def test_any_one_layer_may_be_used(layer: int, tmp_path: Path) -> None:
    reference = llava("clip", vision_feature_layer=layer)
    ours = opened(saved(reference, tmp_path, old_names=False))
    pixels = torch.randn(2, 3, 28, 28)
    with torch.no_grad():
        expected = torch.stack(list(reference.get_image_features(pixels, return_dict=True).pooler_output))
    torch.testing.assert_close(ours(pixels), expected, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer is"),
        ({"vision_feature_layer": 9}, "of 4 layers"),
        ({"vision_feature_select_strategy": "full"}, "vision_feature_select_strategy"),
        ({"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type is 'pixtral'"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(changes: dict[str, Any], text: str) -> None:
    values = {**llava("clip").config.to_dict(), **changes}
    file = ConfigFile(values)
    vision = file.section("vision_config")
    assert vision is not None
    with pytest.raises(InvalidArgument, match=text):
        read_llava(file, vision, TEXT_SIZE)
