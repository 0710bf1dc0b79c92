"""InternVL's pictures become the tokens and pixels of transformers' processor."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import InternVLProcessor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

from quire.shared.errors import InvalidArgument
from tests.shared.media.families.tiled import SIZES, byte_tokenizer, expanded, noise, normalized, opened, written

SIDE = 56
PICTURES = {"size": {"height": SIDE, "width": SIDE}, "resample": 3, "image_mean": [0.48, 0.45, 0.4], "max_patches": 6}
NAMES = {
    "start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}  # fmt: skip
TOKENIZER = byte_tokenizer(list(NAMES.values()), extra_special_tokens=NAMES)
CONTEXT_TEXT = "<IMG_CONTEXT>"
CONTEXT = TOKENIZER.encode(CONTEXT_TEXT)[0]
CONFIG = {
    "model_type": "internvl", "image_token_id": CONTEXT, "downsample_ratio": 0.5,
    "vision_config": {"image_size": [SIDE, SIDE], "patch_size": [14, 14]},
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"crop_to_patches": False}, {"max_patches": 3}, {"min_patches": 4}]


def reference(pictures: Sequence[Image.Image], text: str, **options: Any) -> tuple[np.ndarray, list[int]]:
    """Returns pixels and tokens of transformers. Its processor of text and pictures is not made, since that requires a
    video processor and torchvision; its texts are computed by its own method."""
    found = GotOcr2ImageProcessorPil(**PICTURES)(list(pictures), **{"crop_to_patches": True, **options})
    names = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token=CONTEXT_TEXT)
    names.image_seq_length = 4
    for index in range(len(pictures)):
        replacement = InternVLProcessor.replace_image_token(names, found, index).replace(CONTEXT_TEXT, "<video>")
        text = text.replace(CONTEXT_TEXT, replacement, 1)
    return np.stack(found["pixel_values"]), TOKENIZER.encode(text.replace("<video>", CONTEXT_TEXT))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_tokens_are_those_of_transformers(
    size: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    picture, text = noise(*size), "a<IMG_CONTEXT>\nb"
    pixels, wanted = reference([picture], text, **options)
    processor = opened(written(tmp_path, CONFIG, PICTURES, TOKENIZER))
    layout = processor.layout(*size, options)
    np.testing.assert_allclose(normalized(processor, picture, layout), pixels, atol=1e-5)
    tokens, positions = expanded(processor, TOKENIZER.encode(text), [layout], TOKENIZER)
    assert tokens == wanted
    assert positions == [index for index, token in enumerate(tokens) if token == CONTEXT]


def test_several_pictures(tmp_path: Path) -> None:
    pictures, text = [noise(*size) for size in SIZES[:4]], "<IMG_CONTEXT><IMG_CONTEXT>\nand<IMG_CONTEXT>x<IMG_CONTEXT>"
    pixels, wanted = reference(pictures, text)
    processor = opened(written(tmp_path, CONFIG, PICTURES, TOKENIZER))
    layouts = [processor.layout(*size, {}) for size in SIZES[:4]]
    found = [normalized(processor, *pair) for pair in zip(pictures, layouts, strict=True)]
    np.testing.assert_allclose(np.concatenate(found), pixels, atol=1e-5)
    assert expanded(processor, TOKENIZER.encode(text), layouts, TOKENIZER)[0] == wanted


def test_any_size_has_the_grid_of_transformers(tmp_path: Path) -> None:
    """12 tiles of 448 pixels, as published."""
    published = {"size": {"height": 448, "width": 448}, "max_patches": 12}
    config = {**CONFIG, "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}}
    processor, theirs = opened(written(tmp_path, config, published)), GotOcr2ImageProcessorPil(**published)
    assert processor.max_embeddings == 13 * 256
    rng = np.random.default_rng(1)
    for height, width in rng.integers(1, 4000, (500, 2)).tolist():
        wanted = theirs.get_number_of_image_patches(height, width, {"crop_to_patches": True})
        assert processor.layout(height, width, {}).num_tiles == wanted


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_patches": 7}, "max_patches: is 7; a whole number from 1 to 6"),
        ({"max_patches": 0}, "max_patches: is 0"),
        ({"max_patches": True}, "max_patches: is True"),
        ({"max_patches": 2, "min_patches": 3}, "min_patches: is 3; a whole number from 1 to 2"),
        ({"crop_to_patches": "no"}, "crop_to_patches: is 'no'; true or false"),
        ({"max_dynamic_patch": 4}, "max_dynamic_patch: this model's processor has no such option; it has crop_to"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    with pytest.raises(InvalidArgument, match=text):
        processor.layout(100, 100, options)


@pytest.mark.parametrize(
    ("config", "pictures", "text"),
    [
        ({}, {"size": {"height": 28, "width": 28}}, "tiles have 28 x 28 pixels, and vision_config.image_size is 56"),
        ({"vision_config": {"image_size": [56, 28]}}, {}, "image_size is"),
        ({}, {"min_patches": 9}, "min_patches is 9 and max_patches 6"),
        ({}, {"max_patches": 10**9}, "max_patches 1000000000"),
        ({}, {"do_resize": False}, "do_resize is false"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    config: dict[str, Any], pictures: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, {**CONFIG, **config}, {**PICTURES, **pictures}))


def test_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    with pytest.raises(InvalidArgument, match="'<img>' is not a token"):
        processor.expand(processor.layout(56, 56, {}), byte_tokenizer(["<image>"]))
