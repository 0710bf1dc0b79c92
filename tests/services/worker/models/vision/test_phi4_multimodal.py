"""The vision part of Phi-4-multimodal computes what transformers' does, for tiles with and without padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.vision.phi4_multimodal import Phi4Vision, read_phi4_multimodal, shown_of_tiles
from quire.services.worker.models.vision.port import MediaInput
from quire.shared.errors import InvalidArgument
from quire.shared.media.families.phi4_multimodal import Phi4Processor
from tests.services.worker.models.vision.towers import (
    NORMALIZATION,
    TEXT,
    TEXT_SIZE,
    TOWER,
    normalized,
    opened,
    random_item,
    random_model,
    saved,
)

SIDE, PATCH, PATCHES, IMAGE = 56, 14, 4, 99
SIZES = [(56, 56), (100, 60), (57, 20), (20, 150), (300, 90), (40, 40)]


def phi4(**vision: Any) -> Any:
    tower = {**TOWER, "image_size": SIDE, "crop_size": SIDE, "patch_size": PATCH, "image_token_id": IMAGE, **vision}
    audio = {
        **{"hidden_size": 16, "intermediate_size": 16, "num_blocks": 1, "num_attention_heads": 2},
        **{"ext_pw_out_channel": 16, "depthwise_separable_out_channel": 16, "nemo_conv_channels": 8},
    }
    config = transformers.Phi4MultimodalConfig(**TEXT, vision_config=tower, audio_config=audio, pad_token_id=0)
    model = random_model("Phi4MultimodalForCausalLM", config)
    model.set_attn_implementation("eager")  # with sdpa, transformers 5.24 lets patches see earlier ones only
    return model


def rows_of_transformers(model: Any, item: MediaInput) -> torch.Tensor:
    """Returns the embeddings that transformers puts into the place of one picture's tokens."""
    rows, columns = item.layout[:2]
    tiles = normalized([item])
    grid = tiles.view(rows, columns, 3, SIDE, SIDE).permute(2, 0, 3, 1, 4).reshape(1, 3, rows * SIDE, columns * SIDE)
    whole = torch.nn.functional.interpolate(grid, (SIDE, SIDE), mode="bicubic")
    masks = torch.zeros(1 + rows * columns, PATCHES, PATCHES)
    masks[0] = 1
    for mask, (shown_rows, shown_columns) in zip(masks[1:], shown_of_tiles(item.layout, PATCHES), strict=True):
        mask[:shown_rows, :shown_columns] = 1
    ids = torch.full((1, 2000), IMAGE)
    count = num_rows(item)
    ids[:, count:] = 0
    with torch.no_grad():
        merged = model.model.embed_tokens_extend.image_embed(
            ids,
            torch.zeros(1, 2000, TEXT_SIZE),
            torch.cat((whole, tiles))[None],
            torch.tensor([[rows * SIDE, columns * SIDE]]),
            masks[None],
        )
    return merged[0, :count]


def processor() -> Phi4Processor:
    return Phi4Processor(IMAGE, NORMALIZATION, SIDE, PATCH, 6)


def num_rows(item: MediaInput) -> int:
    _, _, rows, columns = item.layout
    base = PATCHES // 2
    return -(-rows // 2) * (-(-columns // 2) + 1) + 1 + base * (base + 1)


@pytest.mark.parametrize("layer", [-2, -1, 1])
def test_rows_are_those_of_transformers(layer: int, tmp_path: Path) -> None:
    model = phi4(feature_layer=layer)
    encoder = opened(saved(model, tmp_path), read_phi4_multimodal, Phi4Vision)
    layouts = [processor().layout(*size, {}) for size in SIZES]
    items = [random_item(layout.num_tiles, SIDE, layout.numbers) for layout in layouts]
    for item, found in zip(items, encoder.encode(items), strict=True):
        assert found.shape == (num_rows(item), TEXT_SIZE)
        torch.testing.assert_close(found, rows_of_transformers(model, item), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "siglip_vision_model"}, "vision_config.model_type is"),
        ({"feature_layer": 7}, "feature_layer is 7"),
        ({"image_size": 70}, "an even number of patches"),
    ],
)
def test_unsupported_vision_parts_are_refused_by_field(changes: dict[str, Any], text: str) -> None:
    vision = {**TOWER, "image_size": SIDE, "patch_size": PATCH, **changes}
    with pytest.raises(InvalidArgument, match=text):
        read_phi4_multimodal(ConfigFile({}), ConfigFile(vision), TEXT_SIZE)
