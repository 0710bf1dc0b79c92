"""Pictures of Qwen2-VL to Qwen3-VL get the sizes, pixels and tokens of transformers' processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import MediaProcessor
from quire.shared.media.registry import read_media_processor

QWEN2_5 = {
    "model_type": "qwen2_5_vl", "image_token_id": 77,
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2},
}  # fmt: skip
QWEN3 = {
    "model_type": "qwen3_vl", "image_token_id": 78,
    "vision_config": {"patch_size": 16, "spatial_merge_size": 2},
}  # fmt: skip
PIXELS_2_5 = {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2}  # as published
PIXELS_3 = {
    "size": {"longest_edge": 200_000, "shortest_edge": 65_536}, "patch_size": 16, "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
}  # fmt: skip
MODELS = {"qwen2.5": (QWEN2_5, PIXELS_2_5), "qwen3": (QWEN3, PIXELS_3), "class-defaults": (QWEN2_5, {})}
SIZES = [(56, 56), (57, 83), (480, 640), (641, 479), (10, 300), (1000, 31), (1, 1), (3, 590), (700, 5)]


class NoTokenizer:
    """Tokenizer that must not be called: the expansion has no text."""

    def encode(self, text: str) -> NoReturn:
        raise AssertionError(text)


def processor(folder: Path, config: dict[str, Any], values: dict[str, Any]) -> MediaProcessor:
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    found = read_media_processor(folder)
    assert found is not None
    return found


def noise(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def patches(tiles: np.ndarray, layout: tuple[int, ...], patch: int) -> np.ndarray:
    """Cuts normalized pixels [1, height, width, 3] into rows of two equal frames, squares of 2 x 2 patches together."""
    _, rows, columns = layout
    cells = tiles[0].reshape(rows, 2, patch, columns, 2, patch, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    return np.repeat(cells[:, :, :, :, :, None], 2, axis=5).reshape(4 * rows * columns, -1)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", MODELS)
def test_pixels_and_grids_are_those_of_transformers(model: str, size: tuple[int, int], tmp_path: Path) -> None:
    config, values = MODELS[model]
    ours, picture = processor(tmp_path, config, values), noise(*size)
    layout = ours.layout(*size, {})
    normalization, pixels = ours.normalization, ours.render(picture, layout)
    assert pixels.shape == (1, layout.height, layout.width, 3)
    normalized = (pixels.astype(np.float32) * normalization.factor - normalization.mean) / normalization.std
    expected = Qwen2VLImageProcessorPil(**values)(picture, return_tensors="np")
    frames, rows, columns = expected["image_grid_thw"][0]
    assert layout.numbers == (frames, rows // 2, columns // 2)
    found = patches(normalized, layout.numbers, values.get("patch_size", 14))
    np.testing.assert_allclose(found, expected["pixel_values"], atol=1e-5)
    expansion = ours.expand(layout, NoTokenizer())
    count = int(expected["image_grid_thw"][0].prod()) // 4
    assert expansion == ((config["image_token_id"],) * count, ((0, count),))
    assert expansion.num_embeddings <= ours.max_embeddings


@pytest.mark.parametrize(
    "options",
    [
        {"min_pixels": 100_352, "max_pixels": 200_704},
        {"max_pixels": 50_176},
        {"size": {"shortest_edge": 12_544, "longest_edge": 25_088}},
    ],
)
def test_options_of_a_request_change_the_bounds(options: dict[str, Any], tmp_path: Path) -> None:
    ours, picture = processor(tmp_path, QWEN2_5, PIXELS_2_5), noise(300, 200)
    bounds = {"shortest_edge": options.get("min_pixels", 3136), "longest_edge": options.get("max_pixels", 12_845_056)}
    theirs = Qwen2VLImageProcessorPil(**PIXELS_2_5)
    _, rows, columns = theirs(picture, return_tensors="np", size=options.get("size", bounds))["image_grid_thw"][0]
    assert ours.layout(300, 200, options).numbers == (1, rows // 2, columns // 2)


def test_the_most_tokens_hold_for_every_aspect(tmp_path: Path) -> None:
    for bounds in ({"min_pixels": 3136, "max_pixels": 50_176}, {"min_pixels": 50_000, "max_pixels": 50_176}):
        ours = processor(tmp_path, QWEN2_5, bounds)
        for height in (1, 2, 9, 28, 83, 300, 999):
            for width in range(height, 200 * height + 1, 5 * height):
                layout = ours.layout(height, width, {})
                assert layout.numbers[1] * layout.numbers[2] <= ours.max_embeddings


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"do_resize": False}, "mm_processor_kwargs.do_resize: this model's processor has no such option"),
        ({"min_pixels": 0}, "min_pixels is 0"),
        ({"max_pixels": "many"}, "max_pixels is 'many'"),
        ({"min_pixels": 9_000, "max_pixels": 8_000}, "min_pixels is 9000, more than max_pixels, 8000"),
        ({"size": {"height": 28}}, "size is {'height': 28}"),
        ({"min_pixels": 10**9, "max_pixels": 10**9}, "a picture has at most"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text.replace("{", r"\{")) as refused:
        processor(tmp_path, QWEN2_5, PIXELS_2_5).layout(300, 300, options)
    assert refused.value.field == "mm_processor_kwargs"


def test_a_strip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="absolute aspect ratio must be smaller than 200, got 300"):
        processor(tmp_path, QWEN2_5, PIXELS_2_5).layout(1, 300, {})


def test_a_model_without_a_processor_file_takes_no_pictures(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_media_processor(tmp_path) is None


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"patch_size": 16}, "patch_size and merge_size are 16 and 2, and vision_config has 14 and 2"),
        ({"resample": 7}, "resample is 7"),
        ({"do_rescale": False}, "do_rescale is false"),
        ({"min_pixels": -5}, "min_pixels is -5"),
        ({"patch_size": 0}, "patch_size is 0; a number from 1"),
        ({"merge_size": "2"}, "merge_size is '2'; a number from 1"),
    ],
)
def test_files_that_do_not_fit_are_refused(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        processor(tmp_path, QWEN2_5, values)
