"""Processors are found by config.json and the processor's files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.llava import LlavaProcessor
from quire.shared.media.families.pixtral import PixtralProcessor
from quire.shared.media.registry import read_media_processor

PIXTRAL = {"model_type": "llava", "image_token_index": 10, "vision_config": {"model_type": "pixtral"}}
CLIP = {**PIXTRAL, "vision_config": {"model_type": "clip_vision_model", "image_size": 28, "patch_size": 7}}
FIXED = {"size": {"height": 28, "width": 28}}


def folder_of(folder: Path, config: dict[str, Any], settings: dict[str, Any] | None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if settings is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    return folder


def test_llava_depends_on_its_tower(tmp_path: Path) -> None:
    assert isinstance(read_media_processor(folder_of(tmp_path, PIXTRAL, {})), PixtralProcessor)
    assert isinstance(read_media_processor(folder_of(tmp_path, CLIP, FIXED)), LlavaProcessor)


@pytest.mark.parametrize("config", [PIXTRAL, CLIP, {"model_type": "mistral3", "vision_config": {}}])
def test_a_folder_without_processor_files_serves_text(config: dict[str, Any], tmp_path: Path) -> None:
    """Text fine-tunes of vision models are often published without them."""
    assert read_media_processor(folder_of(tmp_path, config, None)) is None


def test_text_models_and_gguf_take_no_pictures(tmp_path: Path) -> None:
    assert read_media_processor(tmp_path) is None
    assert read_media_processor(folder_of(tmp_path, {"model_type": "llama"}, FIXED)) is None
    assert read_media_processor(folder_of(tmp_path, {"model_type": "gemma3"}, FIXED)) is None, "Gemma 3 1B"


def test_settings_of_another_processor_are_refused(tmp_path: Path) -> None:
    other = {**CLIP, "vision_config": {"model_type": "clip_vision_model", "image_size": 56}}
    folder = folder_of(tmp_path, other, FIXED)
    with pytest.raises(InvalidArgument, match=r"pictures have 28 x 28 pixels, and vision_config\.image_size is 56"):
        read_media_processor(folder)
