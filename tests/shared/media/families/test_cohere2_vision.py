"""Cohere2 Vision's pictures have the grids and the tokens of transformers' processor."""

from __future__ import annotations

import ast
import functools
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import transformers
from transformers.models.cohere2_vision.processing_cohere2_vision import Cohere2VisionProcessor

from quire.shared.errors import InvalidArgument
from tests.shared.media.families.tiled import SIZES, byte_tokenizer, expanded, noise, opened, written

SIDE, ROWS = 56, 2
PATCH_TEXT = "<|IMG_PATCH|>"
NAMES = {"boi_token": "<|START_OF_IMG|>", "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>"}
PICTURES = {"size": {"height": SIDE, "width": SIDE}, "resample": 3, "patch_size": ROWS, "max_patches": 6}
TOKENIZER = byte_tokenizer([PATCH_TEXT, *NAMES.values()])
CONFIG = {
    "model_type": "cohere2_vision", "image_token_id": TOKENIZER.encode(PATCH_TEXT)[0],
    "vision_config": {"image_size": SIDE, "patch_size": 14},
}  # fmt: skip
Canvas = Callable[[tuple[int, int], tuple[int, int], int, int], tuple[int, int]]


@pytest.fixture(scope="module")
def canvas() -> Canvas:
    """The function of transformers that chooses a grid, (columns, rows). Its module needs torchvision, which the
    function does not."""
    name = "models/cohere2_vision/image_processing_cohere2_vision.py"
    tree = ast.parse((Path(transformers.__file__).parent / name).read_text())
    tree.body = [part for part in tree.body if isinstance(part, ast.FunctionDef)]
    found: dict[str, Any] = {"np": np, "lru_cache": functools.lru_cache}
    exec(compile(tree, name, "exec"), found)
    chosen: Canvas = found["get_optimal_tiled_canvas"]
    return chosen


def test_any_size_has_the_grid_of_transformers(canvas: Canvas, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    rng = np.random.default_rng(1)
    sizes = [*SIZES, *map(tuple, rng.integers(1, 1000, (500, 2)).tolist())]
    for height, width in sizes:
        for most in (6, 3, 1):
            columns, rows = canvas((height, width), (SIDE, SIDE), 1, most)
            assert processor.layout(height, width, {"max_patches": most}).numbers == (rows, columns), (height, width)


@pytest.mark.parametrize("size", SIZES)
def test_tokens_are_those_of_transformers(size: tuple[int, int], tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    layout = processor.layout(*size, {})
    assert processor.render(noise(*size), layout).shape == (layout.num_tiles, SIDE, SIDE, 3)
    names = SimpleNamespace(patch_size=ROWS, image_token=PATCH_TEXT, **NAMES)
    shown = Cohere2VisionProcessor.replace_image_token(names, {"num_patches": [layout.num_tiles]}, 0)
    tokens, positions = expanded(processor, TOKENIZER.encode(f"a{PATCH_TEXT}b"), [layout], TOKENIZER)
    assert tokens == TOKENIZER.encode(f"a{shown}b")
    assert positions == [index for index, token in enumerate(tokens) if token == processor.placeholder]
    assert len(positions) == layout.num_tiles * ROWS * ROWS


def test_the_last_tile_is_the_whole_picture(tmp_path: Path) -> None:
    processor, picture = opened(written(tmp_path, CONFIG, PICTURES)), noise(2 * SIDE, 3 * SIDE)
    tiles = processor.render(picture, processor.layout(2 * SIDE, 3 * SIDE, {}))
    pixels = np.asarray(picture)
    np.testing.assert_array_equal(tiles[0], pixels[:SIDE, :SIDE])
    np.testing.assert_array_equal(tiles[4], pixels[SIDE:, SIDE : 2 * SIDE])
    np.testing.assert_array_equal(tiles[6], np.asarray(picture.resize((SIDE, SIDE), 3)))


@pytest.mark.parametrize(
    ("config", "pictures", "text"),
    [
        ({}, {"patch_size": 4}, "patch_size is 4, and a tile has 2 rows of embeddings"),
        ({"downsample_factor": 4}, {}, "patch_size is 2, and a tile has 1 rows"),
        ({}, {"max_patches": 1000}, "max_patches is 1000; a whole number from 1 to 256"),
        ({}, {"size": {"height": 28, "width": 28}}, "tiles have 28 x 28 pixels, and vision_config.image_size is 56"),
    ],
)
def test_files_that_do_not_fit_are_refused(
    config: dict[str, Any], pictures: dict[str, Any], text: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, {**CONFIG, **config}, {**PICTURES, **pictures}))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_patches": 7}, "max_patches: is 7; a whole number from 1 to 6"),
        ({"min_patches": 7}, "min_patches: is 7"),
        ({"crop_to_patches": 1}, "crop_to_patches: is 1; true or false"),
        ({"tiles": 1}, "tiles: this model's processor has no such option"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, CONFIG, PICTURES)).layout(100, 100, options)
