"""Pixtral and Mistral 3: tokens and pixels are those of transformers' processor."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers.models.pixtral.image_processing_pil_pixtral as with_pillow
from PIL import Image

from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import MediaProcessor
from quire.shared.media.registry import read_media_processor
from tests.shared.media.families.prompts import expanded, noise, word_tokenizer

TOKENS = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
SIZES = [(64, 64), (65, 64), (480, 640), (641, 79), (31, 300), (1000, 40), (1, 1), (7, 90), (128, 127)]  # height, width
MODELS: dict[str, dict[str, Any]] = {
    "llava": {"model_type": "llava", "image_token_index": 10, "vision_config": {"model_type": "pixtral"}},
    "mistral3": {
        "model_type": "mistral3", "image_token_id": 10, "spatial_merge_size": 2,
        "vision_config": {"model_type": "pixtral", "patch_size": 14},
    },
}  # fmt: skip
SETTINGS = {"size": {"longest_edge": 128}, "patch_size": {"height": 99, "width": 99}, "resample": 3}


def written(folder: Path, kind: str, **settings: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(MODELS[kind]))
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return folder


def opened(folder: Path) -> MediaProcessor:
    processor = read_media_processor(folder)
    assert processor is not None
    return processor


def reference(kind: str, tokenizer: Any) -> Any:
    """Returns transformers' processor, with the picture processor that needs no torchvision."""
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", with_pillow)
    module = importlib.import_module("transformers.models.pixtral.processing_pixtral")
    pictures = with_pillow.PixtralImageProcessorPil(size=SETTINGS["size"])
    model = MODELS[kind]
    merge, patch = model.get("spatial_merge_size", 1), model["vision_config"].get("patch_size", 16)
    return module.PixtralProcessor(pictures, tokenizer, patch_size=patch, spatial_merge_size=merge)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_tokens_of_a_picture(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    processor, tokenizer = opened(written(tmp_path, kind)), word_tokenizer(TOKENS)
    picture = noise(*size)
    expected = reference(kind, tokenizer)(images=[picture], text="a [IMG] b", return_tensors="np")
    layout = processor.layout(*size, {})
    pixels = processor.render(picture, layout)
    assert pixels.shape == (1, layout.height, layout.width, 3)
    mean, std, factor = processor.normalization
    normalized = (pixels[0].astype(np.float32) * factor - mean) / std
    np.testing.assert_allclose(normalized.transpose(2, 0, 1), expected["pixel_values"][0], atol=1e-5)
    found = expanded(processor, tokenizer("a [IMG] b").input_ids, [layout], tokenizer)
    assert found.token_ids == expected["input_ids"][0].tolist()
    assert found.embedded == [at for at, token in enumerate(found.token_ids) if token == 10]
    assert len(found.embedded) <= processor.max_embeddings


def test_squares_of_patches_count_before_sides_are_rounded_up(tmp_path: Path) -> None:
    """A picture of 1080 x 675 pixels takes 975 tokens, not 936: transformers#37019."""
    processor = opened(written(tmp_path, "mistral3", size={"longest_edge": 1540}))
    layout = processor.layout(675, 1080, {})
    tokenizer = word_tokenizer(TOKENS)
    found = expanded(processor, [10], [layout], tokenizer)
    assert (len(found.embedded), len(found.token_ids)) == (975, 975 + 25)


def test_the_model_says_how_large_patches_are(tmp_path: Path) -> None:
    """Processor files of Magistral have sizes of another model: mlx-vlm#855."""
    folder = written(tmp_path, "mistral3")
    (folder / "processor_config.json").write_text(json.dumps({"patch_size": 16, "spatial_merge_size": 1}))
    assert opened(folder).layout(56, 84, {})[:3] == (1, 56, 84)


@pytest.mark.parametrize("kind", MODELS)
def test_several_pictures_of_different_sizes(kind: str, tmp_path: Path) -> None:
    processor, tokenizer = opened(written(tmp_path, kind)), word_tokenizer(TOKENS)
    pictures, text = [noise(*size) for size in SIZES], " ".join(["[IMG] b"] * len(SIZES))
    expected = reference(kind, tokenizer)(images=[pictures], text=[text], return_tensors="np")
    layouts = [processor.layout(*size, {}) for size in SIZES]
    found = expanded(processor, tokenizer(text).input_ids, layouts, tokenizer)
    assert found.token_ids == expected["input_ids"][0].tolist()
    assert [[layout.height, layout.width] for layout in layouts] == expected["image_sizes"].tolist()


@pytest.mark.parametrize("size", [{"longest_edge": 50}, {"height": 40, "width": 100}])
def test_a_request_may_ask_for_smaller_pictures(size: dict[str, int], tmp_path: Path) -> None:
    """The grid follows the request's size, not the tower's: vllm#52874."""
    processor, tokenizer = opened(written(tmp_path, "mistral3")), word_tokenizer(TOKENS)
    expected = reference("mistral3", tokenizer)(images=[noise(300, 200)], text="[IMG]", size=size, return_tensors="np")
    layout = processor.layout(300, 200, {"size": size})
    assert expanded(processor, [10], [layout], tokenizer).token_ids == expected["input_ids"][0].tolist()


@pytest.mark.parametrize("size", [{"longest_edge": 129}, {"longest_edge": 0}, {"shortest_edge": 20}, "big", 1.5])
def test_sizes_that_the_model_cannot_take(size: Any, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, "mistral3"))
    with pytest.raises(InvalidArgument, match=r"mm_processor_kwargs.size is .* up to 128 x 128 pixels"):
        processor.layout(100, 100, {"size": size})


def test_unknown_options_and_lines_of_pixels_are_refused(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, "llava"))
    with pytest.raises(InvalidArgument, match=r"mm_processor_kwargs.max_pixels: .* it has size"):
        processor.layout(100, 100, {"max_pixels": 5})
    with pytest.raises(InvalidArgument, match="factor of more than 128"):
        processor.layout(1, 5000, {})


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"size is {'shortest_edge': 5}; longest_edge, or height and width"):
        opened(written(tmp_path, "llava", size={"shortest_edge": 5}))
    processor = opened(written(tmp_path, "llava"))
    with pytest.raises(InvalidArgument, match=r"has no token '\[IMG_BREAK\]'"):
        expanded(processor, [10], [processor.layout(64, 64, {})], word_tokenizer({"[IMG]": 10}))


def test_names_of_row_ends_come_from_the_processor_file(tmp_path: Path) -> None:
    folder = written(tmp_path, "llava")
    (folder / "processor_config.json").write_text(
        json.dumps({"image_break_token": "<row>", "image_end_token": "<end>"})
    )
    processor, tokenizer = opened(folder), word_tokenizer({"[IMG]": 10, "<row>": 11, "<end>": 14})
    layout = processor.layout(32, 16, {})
    assert expanded(processor, [10], [layout], tokenizer).token_ids == [10, 11, 10, 14]


def test_a_picture_that_fits_is_not_scaled(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, "llava"))
    picture = Image.new("RGB", (16, 32), (1, 2, 3))
    assert (processor.render(picture, processor.layout(32, 16, {})) == (1, 2, 3)).all()
