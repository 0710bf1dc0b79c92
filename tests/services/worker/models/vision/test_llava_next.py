"""Encoders of LLaVA-NeXT and LLaVA-OneVision compute what transformers' get_image_features does, for pictures of many
sizes together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch.nn.utils.rnn import pad_sequence

from quire.services.worker.models.vision.llava import read_llava
from quire.services.worker.models.vision.llava_next import LlavaNextVision, read_llava_onevision
from quire.shared.media.families.llava_next import AnyResProcessor
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

SIDE, PATCHES = 56, 4
CANVASES = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168], [224, 224]]
SIZES = [(56, 56), (40, 400), (400, 40), (500, 480), (1, 1), (2, 900), (900, 2), (130, 77)]
GRID = {"image_size": SIDE, "patch_size": 14}


def model_of(family: str, **changes: Any) -> Any:
    text = {"model_type": "qwen2", **TEXT}
    if family == "next":
        tower = {"model_type": "clip_vision_model", "projection_dim": 16, **TOWER, **GRID}
        config = transformers.LlavaNextConfig(
            vision_config=tower, text_config=text, image_grid_pinpoints=CANVASES, **changes
        )
        return random_model("LlavaNextForConditionalGeneration", config)
    tower = {"model_type": "siglip_vision_model", "vision_use_head": False, **TOWER, **GRID}
    config = transformers.LlavaOnevisionConfig(
        vision_config=tower, text_config=text, image_grid_pinpoints=CANVASES, **changes
    )
    return random_model("LlavaOnevisionForConditionalGeneration", config)


def planned(max_tiles: int) -> AnyResProcessor:
    canvases = tuple((height, width) for height, width in CANVASES)
    return AnyResProcessor(99, NORMALIZATION, SIDE, PATCHES, canvases, max_tiles, "bicubic")


def _old(name: str) -> str:
    """Returns the name in files published for transformers 4."""
    prefix = "vision_tower."
    return f"{prefix}vision_model.{name.removeprefix(prefix)}" if name.startswith(prefix) else name


def _new(name: str) -> str:
    """Returns the name that transformers 5 has in memory."""
    return name if name.startswith(("lm_head", "language_model.")) else f"model.{name}"


@pytest.mark.parametrize("rename", [_old, str, _new])
@pytest.mark.parametrize(("family", "max_tiles"), [("next", 0), ("onevision", 9), ("onevision", 3)])
def test_rows_are_those_of_transformers(family: str, max_tiles: int, rename: Any, tmp_path: Path) -> None:
    changes = {"vision_aspect_ratio": f"anyres_max_{max_tiles}"} if max_tiles else {}
    model = model_of(family, **changes)
    read = read_llava if family == "next" else read_llava_onevision
    encoder = opened(saved(model, tmp_path, rename), read, LlavaNextVision)
    layouts = [planned(max_tiles).layout(*size, {}) for size in SIZES]
    items = [random_item(layout.num_tiles, SIDE, layout.numbers) for layout in layouts]
    padded = pad_sequence([normalized([item]) for item in items], batch_first=True)
    with torch.no_grad():
        expected = model.get_image_features(padded, torch.tensor(SIZES), return_dict=True).pooler_output
        found = encoder.encode(items)
    for layout, rows, wanted in zip(layouts, found, expected, strict=True):
        assert rows.shape == (planned(max_tiles).expand(layout, None).num_embeddings, TEXT_SIZE)  # type: ignore[arg-type]
        torch.testing.assert_close(rows, wanted, rtol=3e-4, atol=3e-4)
