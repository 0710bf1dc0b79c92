"""Llama 4's pictures become the tokens and pixels of transformers' processor.

Its picture processor needs torchvision: grids and pixels below were recorded with transformers 5.24.0 and torchvision
0.28.0. It normalizes in bfloat16, so pixels are compared to two of 255 levels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Llama4Processor

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.llama4 import best_grid
from tests.shared.media.families.tiled import SIZES, byte_tokenizer, expanded, noise, normalized, opened, written

SIDE = 56
PICTURES = {"size": {"height": SIDE, "width": SIDE}, "max_patches": 6}
IMAGE = "<|image|>"
SPECIAL = ["<|image_start|>", "<|image_end|>", "<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>", IMAGE]
TOKENIZER = byte_tokenizer(SPECIAL)
PATCH = TOKENIZER.encode("<|patch|>")[0]
CONFIG = {
    "model_type": "llama4", "image_token_index": PATCH,
    "vision_config": {"image_size": SIDE, "patch_size": 14, "pixel_shuffle_ratio": 0.5},
}  # fmt: skip
# tile, channel, row and column; -1: the last tile
PLACES = [(0, 0, 0, 0), (0, 1, 10, 33), (0, 2, 50, 3), (-1, 0, 28, 28), (-1, 1, 5, 50), (-1, 2, 55, 55)]
RECORDED = [
    ((56, 56), (1, 1), [129, 15, 125, 81, 246, 28]),
    ((170, 171), (2, 3), [173, 179, 139, 144, 101, 116]),
    ((84, 300), (1, 4), [89, 136, 123, 118, 154, 132]),
    ((480, 640), (2, 3), [117, 123, 125, 138, 131, 135]),
    ((7, 400), (1, 6), [153, 0, 0, 126, 125, 100]),
    ((1, 1), (1, 1), [56, 234, 68, 56, 234, 68]),
]


@pytest.mark.parametrize(("size", "grid", "levels"), RECORDED)
def test_grids_and_pixels_are_those_of_transformers(
    size: tuple[int, int], grid: tuple[int, int], levels: list[int], tmp_path: Path
) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    layout = processor.layout(*size, {})
    assert layout.numbers[:2] == grid
    pixels = normalized(processor, noise(*size), layout)
    assert len(pixels) == grid[0] * grid[1] + (grid != (1, 1))
    np.testing.assert_allclose([(pixels[place] * 0.5 + 0.5) * 255 for place in PLACES], levels, atol=2)


@pytest.mark.parametrize(
    ("size", "plain", "filling"),
    [
        ((200, 300), (1, 2), (2, 3)),  # of 224 pixels; the first is the example in transformers
        ((224, 224), (1, 1), (2, 2)),
        ((800, 600), (3, 2), (3, 2)),
        ((90, 1000), (1, 5), (1, 6)),
    ],
)
def test_grids_fit_without_and_with_filling(
    size: tuple[int, int], plain: tuple[int, int], filling: tuple[int, int]
) -> None:
    assert best_grid(*size, 224, 6, fills_canvas=False) == plain
    assert best_grid(*size, 224, 6, fills_canvas=True) == filling


def texts_of_transformers() -> Llama4Processor:
    """Returns a processor without a picture processor, which only computes the texts of pictures."""
    found = Llama4Processor.__new__(Llama4Processor)
    found.patch_size, found.downsample_ratio = 14, 4
    return found


@pytest.mark.parametrize("num_pictures", [1, 3])
def test_tokens_are_those_of_transformers(num_pictures: int, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES, TOKENIZER))
    for first in range(len(SIZES) - num_pictures):
        layouts = [processor.layout(*size, {}) for size in SIZES[first : first + num_pictures]]
        found = {"pixel_values": [np.empty((3, SIDE, SIDE))], "aspect_ratios": [one.numbers[:2] for one in layouts]}
        texts = [texts_of_transformers().replace_image_token(found, index) for index in range(num_pictures)]
        wanted = TOKENIZER.encode("a\n" + "b".join(texts))
        tokens, positions = expanded(
            processor, TOKENIZER.encode("a\n" + "b".join([IMAGE] * num_pictures)), layouts, TOKENIZER
        )
        assert tokens == wanted
        assert positions == [index for index, token in enumerate(tokens) if token == PATCH]


def test_the_placeholder_is_found_in_the_tokenizers_files(tmp_path: Path) -> None:
    assert opened(written(tmp_path, CONFIG, PICTURES)).placeholder == 200_090
    assert opened(written(tmp_path, CONFIG, PICTURES, TOKENIZER)).placeholder == TOKENIZER.encode(IMAGE)[0]
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"77": {"content": "<|image|>"}}}')
    assert opened(tmp_path).placeholder == 77


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"max_patches": 7}, "max_patches: is 7; a whole number from 1 to 6"),
        ({"resize_to_max_canvas": "yes"}, "resize_to_max_canvas: is 'yes'"),
        ({"detail": "low"}, "detail: this model's processor has no such option; it has max_patches"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    with pytest.raises(InvalidArgument, match=text):
        processor.layout(100, 100, options)


@pytest.mark.parametrize(
    ("pictures", "text"),
    [
        ({"size": {"height": 28, "width": 28}}, "tiles have 28 x 28 pixels, and vision_config.image_size is 56"),
        ({"max_patches": 0.5}, "max_patches is 0.5"),
        ({"max_patches": 10**9}, "max_patches is 1000000000"),
    ],
)
def test_files_that_do_not_fit_are_refused(pictures: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, CONFIG, {**PICTURES, **pictures}))
