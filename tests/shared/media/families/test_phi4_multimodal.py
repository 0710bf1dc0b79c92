"""Phi-4-multimodal's pictures become the tokens and pixels of transformers' processor.

It needs torchvision: tokens, grids and pixels below were recorded with transformers 5.24.0 and torchvision 0.28.0.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.shared.errors import InvalidArgument
from tests.shared.media.families.tiled import byte_tokenizer, noise, normalized, opened, written

PUBLISHED = {"model_type": "phi4_multimodal", "vision_config": {"image_size": 448, "patch_size": 14}}
SMALL = {"model_type": "phi4_multimodal", "vision_config": {"image_size": 56, "patch_size": 14}}
PICTURES = {"size": {"height": 56, "width": 56}, "dynamic_hd": 6}
TOKENS = [
    *[((448, 448), 545), ((449, 448), 562), ((100, 60), 449), ((1000, 700), 1791), ((300, 3000), 1629)],
    *[((50, 1500), 468), ((900, 449), 1473), ((1532, 1150), 3409), ((924, 492), 1569)],
]
# tile, channel, row and column; -1: the last tile
PLACES = [(0, 0, 0, 0), (0, 1, 10, 33), (0, 2, 20, 3), (-1, 0, 28, 28), (-1, 1, 5, 50), (-1, 2, 55, 55)]
RECORDED = [
    ((56, 56), (1, 1, 4, 4), [129, 15, 66, 81, 246, 28]),
    ((84, 300), (1, 4, 4, 15), [89, 136, 153, 146, 255, 255]),
    ((170, 171), (2, 2, 8, 8), [173, 177, 67, 171, 132, 255]),
    ((300, 90), (3, 1, 12, 4), [108, 128, 120, 106, 255, 255]),
    ((480, 640), (2, 3, 8, 11), [117, 123, 112, 135, 255, 255]),
    ((57, 56), (2, 1, 5, 4), [244, 230, 239, 255, 255, 255]),
]


@pytest.mark.parametrize(("size", "count"), TOKENS)
def test_tokens_are_those_of_transformers(size: tuple[int, int], count: int, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, PUBLISHED, {"dynamic_hd": 36}))
    expansion = processor.expand(processor.layout(*size, {}), byte_tokenizer([]))
    assert expansion.token_ids == (200_010,) * count
    assert expansion.num_embeddings == count <= processor.max_embeddings


@pytest.mark.parametrize(("size", "grid", "levels"), RECORDED)
def test_grids_and_pixels_are_those_of_transformers(
    size: tuple[int, int], grid: tuple[int, ...], levels: list[int], tmp_path: Path
) -> None:
    processor = opened(written(tmp_path, SMALL, PICTURES))
    layout = processor.layout(*size, {})
    assert layout.numbers == grid
    pixels = normalized(processor, noise(*size), layout)
    assert len(pixels) == grid[0] * grid[1]
    np.testing.assert_allclose([(pixels[place] * 0.5 + 0.5) * 255 for place in PLACES], levels, atol=1.01)


def test_every_tile_shows_a_part_of_the_picture(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, PUBLISHED, {"dynamic_hd": 36}))
    for height, width in np.random.default_rng(3).integers(40, 9000, (2000, 2)).tolist():
        if not 1 / 40 < height / width < 40:
            continue
        rows, columns, shown_rows, shown_columns = processor.layout(height, width, {}).numbers
        assert rows * columns <= 36
        assert 32 * (rows - 1) < shown_rows <= 32 * rows
        assert 32 * (columns - 1) < shown_columns <= 32 * columns


@pytest.mark.parametrize(
    ("size", "options", "text"),
    [
        ((5, 500), {}, "aspect ratio of a picture is very extreme: 5 x 500"),
        ((56, 56), {"dynamic_hd": 7}, "dynamic_hd: is 7; a whole number from 1 to 6"),
        ((56, 56), {"patch_size": 7}, "patch_size: this model's processor has no such option; it has dynamic_hd"),
    ],
)
def test_refusals_name_the_reason(size: tuple[int, int], options: dict[str, Any], text: str, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, SMALL, PICTURES))
    with pytest.raises(InvalidArgument, match=text):
        processor.layout(*size, options)


@pytest.mark.parametrize(
    ("pictures", "text"),
    [({"size": {"height": 28, "width": 28}}, "tiles have 28 x 28 pixels"), ({"dynamic_hd": -1}, "dynamic_hd is -1")],
)
def test_files_that_do_not_fit_are_refused(pictures: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, SMALL, {**PICTURES, **pictures}))
