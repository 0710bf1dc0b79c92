"""The vision parts of Pixtral and Mistral 3 compute what those of transformers do, for pictures of any size."""

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
from quire.services.worker.models.vision.normalization import normalize
from quire.services.worker.models.vision.pixtral import PixtralVision, read_pixtral
from quire.services.worker.models.vision.port import MediaInput
from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import CLIP_MEAN, CLIP_STD
from quire.shared.media.processor import Normalization

TEXT_SIZE = 48
PLAIN = Normalization(CLIP_MEAN, CLIP_STD)
TOWER = {
    "model_type": "pixtral", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3,
    "num_attention_heads": 2, "patch_size": 4, "image_size": 64,
}  # fmt: skip
TEXT = {
    "model_type": "mistral", "hidden_size": TEXT_SIZE, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 100, "rms_norm_eps": 1e-3,
}  # fmt: skip
SIZES = [(16, 16), (8, 64), (64, 8), (8, 8), (24, 40)]  # height, width


def reference(kind: str, tower: dict[str, Any] | None = None, **changes: Any) -> Any:
    """Returns transformers' model of `kind`, a name in MODELS, with random weights."""
    vision = {**TOWER, **(tower or {})}
    torch.manual_seed(11)
    if kind == "mistral3":
        config = transformers.Mistral3Config(vision_config=vision, text_config=TEXT, image_token_index=9, **changes)
        model: Any = transformers.Mistral3ForConditionalGeneration(config)
    else:
        values = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full", **changes}
        config = transformers.LlavaConfig(vision_config=vision, text_config=TEXT, image_token_index=9, **values)
        model = transformers.LlavaForConditionalGeneration(config)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # norms and biases, too
    return model.eval()


def saved(model: Any, folder: Path, *, old_names: bool) -> Path:
    model.save_pretrained(folder)
    if old_names:
        tensors = load_file(folder / "model.safetensors")
        renamed = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def opened(folder: Path) -> PixtralVision:
    file = ConfigFile(transformers.AutoConfig.from_pretrained(folder).to_dict())
    vision = file.section("vision_config")
    assert vision is not None
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"))
    found = PixtralVision(read_pixtral(file, vision, TEXT_SIZE), place, PLAIN)
    Loader("auto", 0).load(found, folder, is_on_other_stage=lambda _: True)
    return found


def features(model: Any, pictures: list[torch.Tensor]) -> list[torch.Tensor]:
    """Returns transformers' rows of each picture; `pictures`: uint8 [1, height, width, 3].

    Each is computed twice: transformers cannot split the rows of a single picture of a single row."""
    pictures = pictures * 2
    sizes = [(picture.size(1), picture.size(2)) for picture in pictures]
    height, width = (max(side) for side in zip(*sizes, strict=True))
    padded = torch.zeros(len(pictures), 3, height, width)
    for place, picture in zip(padded, pictures, strict=True):
        place[:, : picture.size(1), : picture.size(2)] = normalize(picture, PLAIN, torch.float32)[0]
    with torch.no_grad():
        found = model.get_image_features(padded, image_sizes=torch.tensor(sizes), return_dict=True)
    return list(found.pooler_output)[: len(pictures) // 2]


def picture(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height * 1000 + width)
    return torch.randint(0, 256, (1, height, width, 3), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("old_names", [False, True])
@pytest.mark.parametrize("kind", ["llava", "mistral3"])
def test_embeddings_of_pictures_of_many_sizes(kind: str, old_names: bool, tmp_path: Path) -> None:
    model = reference(kind)
    ours = opened(saved(model, tmp_path, old_names=old_names))
    pictures = [picture(*size) for size in SIZES]
    for batch in (*([one] for one in pictures), pictures):
        found, expected = ours.encode([MediaInput(each) for each in batch]), features(model, batch)
        assert [each.shape for each in found] == [each.shape for each in expected]
        for mine, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("kind", "tower", "changes"),
    [
        ("llava", {"hidden_act": "silu"}, {"vision_feature_layer": -2, "multimodal_projector_bias": False}),
        ("llava", {"rope_parameters": {"rope_theta": 100.0, "rope_type": "axial"}}, {"projector_hidden_act": "relu"}),
        ("mistral3", {"num_attention_heads": 4}, {"spatial_merge_size": 1, "multimodal_projector_bias": True}),
        ("mistral3", {"patch_size": 2}, {"spatial_merge_size": 4, "vision_feature_layer": 1}),
    ],
)
def test_other_configurations(kind: str, tower: dict[str, Any], changes: dict[str, Any], tmp_path: Path) -> None:
    model = reference(kind, tower, **changes)
    ours = opened(saved(model, tmp_path, old_names=False))
    batch = [picture(16, 32), picture(24, 8)]
    for mine, theirs in zip(ours.encode([MediaInput(one) for one in batch]), features(model, batch), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"vision_feature_layer": [-1, -2]}, "vision_feature_layer is"),
        ({"vision_feature_layer": 9}, "one of 3 layers is needed"),
        ({"vision_feature_select_strategy": "default"}, "vision_feature_select_strategy is 'default'"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, "vision_config.model_type is 'clip_vision_model'"),
    ],
)
def test_what_is_not_computed_is_refused_by_field(changes: dict[str, Any], text: str) -> None:
    file = ConfigFile({**reference("llava").config.to_dict(), **changes})
    vision = file.section("vision_config")
    assert vision is not None
    with pytest.raises(InvalidArgument, match=text):
        read_pixtral(file, vision, TEXT_SIZE)
