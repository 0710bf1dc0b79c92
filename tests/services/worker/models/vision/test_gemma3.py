"""Gemma 3's vision part computes what transformers' does, from its own files of any age."""

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
from quire.services.worker.models.vision.gemma3 import Gemma3Vision, read_gemma3
from quire.services.worker.models.vision.normalization import normalize
from quire.services.worker.models.vision.port import MediaInput
from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import Normalization

TEXT_SIZE = 48
HALF = Normalization((0.5,) * 3, (0.5,) * 3)
TOWER = {
    "model_type": "siglip_vision_model", "hidden_size": 36, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 3, "patch_size": 4, "image_size": 32,
}  # fmt: skip
TEXT = {
    "hidden_size": TEXT_SIZE, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100,
}  # fmt: skip
# Prefixes of the tower and the projector in files of transformers 5, 4.52 and earlier.
PREFIXES = {
    "5": ("model.vision_tower.", "model.multi_modal_projector."),
    "4.52": ("model.vision_tower.vision_model.", "model.multi_modal_projector."),
    "4.50": ("vision_tower.vision_model.", "multi_modal_projector."),
}


def reference(tower: dict[str, Any] | None = None, **changes: Any) -> transformers.Gemma3ForConditionalGeneration:
    values = {"mm_tokens_per_image": 16, **changes}
    config = transformers.Gemma3Config(vision_config={**TOWER, **(tower or {})}, text_config=TEXT, **values)
    torch.manual_seed(13)
    model = transformers.Gemma3ForConditionalGeneration(config).eval()
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # norms, biases and the projection, which begins at zero
    return model


def saved(model: transformers.Gemma3ForConditionalGeneration, folder: Path, names: str) -> Path:
    model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tower, projector = PREFIXES[names]
    renamed = {_renamed(name, tower, projector): tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def _renamed(name: str, tower: str, projector: str) -> str:
    plain = name.removeprefix("model.").replace("vision_tower.vision_model.", "vision_tower.")
    for part, prefix in (("vision_tower.", tower), ("multi_modal_projector.", projector)):
        if plain.startswith(part):
            return prefix + plain.removeprefix(part)
    return name


def opened(folder: Path) -> Gemma3Vision:
    file = ConfigFile(transformers.AutoConfig.from_pretrained(folder).to_dict())
    vision = file.section("vision_config")
    assert vision is not None
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"))
    found = Gemma3Vision(read_gemma3(file, vision, TEXT_SIZE), place, HALF)
    Loader("auto", 0).load(found, folder, is_on_other_stage=lambda _: True)
    return found


def features(model: transformers.Gemma3ForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """Returns transformers' rows of uint8 pixels [num_tiles, side, side, 3], [num_tiles, num_embeddings, TEXT_SIZE]."""
    with torch.no_grad():
        found: torch.Tensor = model.get_image_features(normalize(pixels, HALF, torch.float32)).pooler_output
    return found


def tiles(count: int, side: int = 32) -> torch.Tensor:
    return torch.randint(
        0, 256, (count, side, side, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(count)
    )


@pytest.mark.parametrize("names", PREFIXES)
def test_embeddings_of_pictures_with_and_without_crops(names: str, tmp_path: Path) -> None:
    model = reference()
    ours = opened(saved(model, tmp_path, names))
    batch = [tiles(1), tiles(3), tiles(5)]  # the picture alone, or with two or four crops
    found = ours.encode([MediaInput(pixels) for pixels in batch])
    (alone,) = ours.encode([MediaInput(batch[0])])
    torch.testing.assert_close(alone, found[0], rtol=2e-4, atol=2e-4)
    for rows, pixels in zip(found, batch, strict=True):
        assert rows.shape == (len(pixels) * 16, TEXT_SIZE)
        torch.testing.assert_close(rows, features(model, pixels).flatten(0, 1), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("tower", "changes"),
    [
        ({}, {"mm_tokens_per_image": 64}),  # nothing is averaged
        ({}, {"mm_tokens_per_image": 1}),
        ({"hidden_act": "gelu", "layer_norm_eps": 1e-2}, {}),
        ({"image_size": 24, "patch_size": 2, "vision_use_head": False}, {"mm_tokens_per_image": 9}),
    ],
)
def test_other_configurations(tower: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    model = reference(tower, **changes)
    ours, pixels = opened(saved(model, tmp_path, "5")), tiles(2, tower.get("image_size", 32))
    (found,) = ours.encode([MediaInput(pixels)])
    torch.testing.assert_close(found, features(model, pixels).flatten(0, 1), rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"mm_tokens_per_image": 15}, "mm_tokens_per_image is 15: a square of a divisor of 8 patches"),
        ({"mm_tokens_per_image": 9}, "mm_tokens_per_image is 9"),
        ({"vision_config": {**TOWER, "model_type": "clip_vision_model"}}, "vision_config.model_type is"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(changes: dict[str, Any], text: str) -> None:
    file = ConfigFile({**reference().config.to_dict(), **changes})
    vision = file.section("vision_config")
    assert vision is not None
    with pytest.raises(InvalidArgument, match=text):
        read_gemma3(file, vision, TEXT_SIZE)
