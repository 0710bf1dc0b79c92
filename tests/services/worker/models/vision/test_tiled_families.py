"""Encoders of families that cut pictures into tiles compute what transformers' get_image_features does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.vision.idefics3 import Idefics3Vision, read_idefics3
from quire.services.worker.models.vision.internvl import InternVLVision, read_internvl
from quire.services.worker.models.vision.llama4 import Llama4Vision, read_llama4
from quire.services.worker.models.vision.tiles import MAX_TILES
from quire.services.worker.models.vision.vit import bucketed_rows
from quire.shared.errors import InvalidArgument
from tests.services.worker.models.vision.towers import (
    TEXT,
    TEXT_SIZE,
    TOWER,
    normalized,
    opened,
    random_item,
    random_model,
    saved,
)

SIDE = 56
GRID = {"image_size": SIDE, "patch_size": 14}
LLAMA4_ADAPTER = {
    "intermediate_size": 128, "vision_output_dim": 40, "projector_input_dim": 40, "projector_output_dim": 40,
}  # fmt: skip
INTERN_6B = {"norm_type": "rms_norm", "use_qk_norm": True, "use_mean_pooling": False, "attention_bias": True}


def internvl(vision: dict[str, Any], **changes: Any) -> Any:
    text = {"model_type": "qwen2", **TEXT}
    config = transformers.InternVLConfig(vision_config={**TOWER, **GRID, **vision}, text_config=text, **changes)
    return random_model("InternVLForConditionalGeneration", config)


def idefics3(vision: dict[str, Any], **changes: Any) -> Any:
    text = {"model_type": "llama", **TEXT}
    config = transformers.Idefics3Config(vision_config={**TOWER, **GRID, **vision}, text_config=text, **changes)
    return random_model("Idefics3ForConditionalGeneration", config)


def smolvlm(vision: dict[str, Any], **changes: Any) -> Any:
    text = {"model_type": "llama", **TEXT}
    config = transformers.SmolVLMConfig(vision_config={**TOWER, **GRID, **vision}, text_config=text, **changes)
    return random_model("SmolVLMForConditionalGeneration", config)


def llama4(vision: dict[str, Any], **changes: Any) -> Any:
    text = {**TEXT, "pad_token_id": 0, "num_local_experts": 2, "head_dim": 16}
    config = transformers.Llama4Config(
        vision_config={**TOWER, **GRID, **LLAMA4_ADAPTER, **vision}, text_config=text, **changes
    )
    return random_model("Llama4ForConditionalGeneration", config)


def internvl_rows(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = model.get_image_features(pixels, return_dict=True).pooler_output
    return rows


def idefics3_rows(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    rows = model.get_image_features(pixels[None], return_dict=True).pooler_output[0]
    return rows.view(len(pixels), -1, TEXT_SIZE)


def llama4_rows(model: Any, pixels: torch.Tensor) -> torch.Tensor:
    """Computes the projected rows; transformers' get_image_features ends before the projector."""
    features = model.vision_model(pixels, return_dict=True).last_hidden_state
    rows: torch.Tensor = model.multi_modal_projector(features)
    return rows


class Family(NamedTuple):
    make: Callable[..., Any]
    rows: Callable[[Any, torch.Tensor], torch.Tensor]
    read: Callable[..., Any]
    encoder: Callable[..., Any]


FAMILIES = {
    "internvl": Family(internvl, internvl_rows, read_internvl, InternVLVision),
    "idefics3": Family(idefics3, idefics3_rows, read_idefics3, Idefics3Vision),
    "smolvlm": Family(smolvlm, idefics3_rows, read_idefics3, Idefics3Vision),
    "llama4": Family(llama4, llama4_rows, read_llama4, Llama4Vision),
}
MODELS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("internvl", {}, {}),
    ("internvl", INTERN_6B, {}),
    ("internvl", {"use_mean_pooling": False}, {"vision_feature_layer": -2}),
    ("internvl", {"hidden_size": 48, "num_attention_heads": 3}, {"downsample_ratio": 0.25}),
    ("idefics3", {}, {}),
    ("idefics3", {"image_size": 182, "patch_size": 14}, {"scale_factor": 1}),  # 13 patches on a side
    ("idefics3", {"hidden_size": 144, "num_attention_heads": 2}, {"scale_factor": 4}),
    ("smolvlm", {}, {}),
    ("llama4", {}, {}),
    ("llama4", {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}, {}),
]


def _new(name: str) -> str:
    """Returns the name that transformers 5 has in memory, of a tensor as it saves it."""
    is_at_root = name.startswith(("model.", "lm_head", "language_model."))
    return name if is_at_root else f"model.{name}"


@pytest.mark.parametrize("new_names", [False, True])
@pytest.mark.parametrize(("family", "vision", "changes"), MODELS)
def test_rows_are_those_of_transformers(
    family: str, vision: dict[str, Any], changes: dict[str, Any], new_names: bool, tmp_path: Path
) -> None:
    found = FAMILIES[family]
    model = found.make(vision, **changes)
    rename = _new if new_names and family != "llama4" else str
    encoder = opened(saved(model, tmp_path, rename), found.read, found.encoder)
    side = vision.get("image_size", SIDE)
    items = [random_item(num_tiles, side) for num_tiles in (1, 5, 3)]
    with torch.no_grad():
        expected = found.rows(model, normalized(items)).split([1, 5, 3])
        computed = encoder.encode(items)
    for item, rows, wanted in zip(items, computed, expected, strict=True):
        assert rows.shape == (len(item.pixels) * wanted.size(1), TEXT_SIZE)
        torch.testing.assert_close(rows, wanted.flatten(0, 1), rtol=3e-4, atol=3e-4)


def test_more_tiles_than_one_batch_takes(tmp_path: Path) -> None:
    encoder = opened(saved(internvl({}), tmp_path), read_internvl, InternVLVision)
    items = [random_item(num_tiles, SIDE) for num_tiles in (MAX_TILES - 1, MAX_TILES + 2, 1)]
    together, apart = encoder.encode(items), [encoder.encode([item])[0] for item in items]
    for rows, wanted in zip(together, apart, strict=True):
        torch.testing.assert_close(rows, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("side", [4, 13, 26, 32])
def test_positions_by_bucket_are_those_of_transformers(side: int) -> None:
    """Rounding puts some patches of Idefics 3's grid of 26 into the bucket before their own."""
    vision = transformers.models.idefics3.modeling_idefics3.Idefics3VisionEmbeddings(
        transformers.models.idefics3.configuration_idefics3.Idefics3VisionConfig(
            hidden_size=1, image_size=side, patch_size=1
        )
    )
    vision.patch_embedding.weight.data.zero_()
    vision.patch_embedding.bias.data.zero_()
    vision.position_embedding.weight.data = torch.arange(side * side, dtype=torch.float32)[:, None]
    mask = torch.ones(1, side, side, dtype=torch.bool)
    rows = vision(torch.zeros(1, 3, side, side), patch_attention_mask=mask).flatten().long()
    assert bucketed_rows(side, side, side).tolist() == rows.tolist()


@pytest.mark.parametrize(
    ("family", "outer", "inner", "text"),
    [
        ("internvl", {"vision_feature_layer": [-1, -2]}, {}, "vision_feature_layer is"),
        ("internvl", {"vision_feature_layer": 9}, {}, "of 3 layers"),
        ("internvl", {"vision_feature_select_strategy": "full"}, {}, "vision_feature_select_strategy is 'full'"),
        ("internvl", {"downsample_ratio": 0.3}, {}, "downsample_ratio is 0.3"),
        ("internvl", {}, {"model_type": "pixtral"}, "vision_config.model_type is 'pixtral'"),
        ("internvl", {}, {"norm_type": "batch_norm"}, "norm_type is 'batch_norm'"),
        ("internvl", {}, {"image_size": [448, 224]}, "image_size is"),
        ("internvl", {}, {"use_absolute_position_embeddings": False}, "use_absolute_position_embeddings"),
        ("idefics3", {"scale_factor": 3}, {}, "scale_factor is 3"),
        ("idefics3", {}, {"model_type": "clip_vision_model"}, "vision_config.model_type is 'clip_vision_model'"),
        ("llama4", {}, {"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio is 0.4"),
        ("llama4", {}, {"vision_output_dim": 41}, "vision_output_dim is 41"),
        ("llama4", {}, {"intermediate_size": 64}, "intermediate_size is 64"),
    ],
)
def test_unsupported_vision_parts_are_refused_by_field(
    family: str, outer: dict[str, Any], inner: dict[str, Any], text: str
) -> None:
    values = FAMILIES[family].make({}).config.to_dict()
    vision = ConfigFile({**values["vision_config"], **inner})
    with pytest.raises(InvalidArgument, match=text):
        FAMILIES[family].read(ConfigFile({**values, **outer}), vision, TEXT_SIZE)
