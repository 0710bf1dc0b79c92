"""InternVL 3: pictures are scaled to a grid of tiles of the nearest aspect; with several tiles the whole picture is the
last one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.options import check_names, read_count, read_flag
from quire.shared.media.picture_sizes import read_processor, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout
from quire.shared.media.special_tokens import read_settings, single_token

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

IMAGE_TOKEN = 151_667  # transformers' default
MIN_TILES, MAX_TILES = 1, 12  # transformers' defaults, without the whole picture
LARGEST_BOUND = 256  # accepted in files
OPTIONS = ("crop_to_patches", "min_patches", "max_patches")


@dataclass(frozen=True, slots=True)
class InternVLProcessor:
    """Cuts pictures into tiles of the tower's size."""

    placeholder: int
    normalization: Normalization
    side: int  # of a tile, in pixels
    tile_embeddings: int
    min_tiles: int
    max_tiles: int
    resampling: str
    start: str  # texts of the tokens around a picture's
    end: str

    @property
    def max_embeddings(self) -> int:
        return self.tile_embeddings * (self.max_tiles + (self.max_tiles > 1))

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans the grid of tiles. `numbers`: its rows and columns. Raises InvalidArgument for unknown options and
        numbers of tiles that the model does not allow."""
        check_names(options, *OPTIONS)
        most = read_count(options, "max_patches", self.max_tiles, self.max_tiles)
        least = read_count(options, "min_patches", min(self.min_tiles, most), most)
        rows, columns = 1, 1
        if read_flag(options, "crop_to_patches", True):
            rows, columns = nearest_grid(height, width, self.side, least, most)
        num_tiles = rows * columns
        return TileLayout(num_tiles + (num_tiles > 1), self.side, self.side, (rows, columns))

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tiles by rows, then the whole picture, [num_tiles, side, side, 3]."""
        from quire.shared.media.tiling import cut_with_whole

        rows, columns = layout.numbers
        return cut_with_whole(picture, rows, columns, self.side, self.resampling)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the start token, the placeholder once for each row, and the end token."""
        num_rows = layout.num_tiles * self.tile_embeddings
        start, end = single_token(tokenizer, self.start), single_token(tokenizer, self.end)
        return PlaceholderExpansion((start, *(self.placeholder,) * num_rows, end), ((1, num_rows),))


def nearest_grid(height: int, width: int, side: int, least: int, most: int) -> tuple[int, int]:
    """Returns rows and columns of the grid with `least` to `most` tiles whose aspect is nearest to the picture's.

    Among equally near ones, in the order of their tiles, a larger grid replaces a smaller one if the picture has more
    than half of its pixels.
    """
    aspect, area = width / height, width * height
    best, least_distance = (1, 1), float("inf")
    for columns, rows in _grids(least, most):
        distance = abs(aspect - columns / rows)
        is_filled = area > 0.5 * side * side * columns * rows
        if distance < least_distance or (distance == least_distance and is_filled):
            best, least_distance = (rows, columns), distance
    return best


@cache
def _grids(least: int, most: int) -> tuple[tuple[int, int], ...]:
    """Returns the columns and rows of all grids with `least` to `most` tiles, ordered by tiles, then by columns."""
    grids = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted((one for one in grids if one[0] * one[1] >= least), key=lambda one: (one[0] * one[1], one[0])))


def make_internvl(folder: Path, config: Mapping[str, Any]) -> InternVLProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    pictures, vision = read_processor(folder), config["vision_config"]
    side, patch = square_side(vision, "image_size", 448), square_side(vision, "patch_size", 14)
    check_tile_side(pictures.size.height, pictures.size.width, side)
    return InternVLProcessor(
        config.get("image_token_id", IMAGE_TOKEN),
        Normalization(pictures.mean, pictures.std, pictures.factor),
        side,
        round((side // patch * config.get("downsample_ratio", 0.5)) ** 2),
        *_tile_bounds(folder),
        pictures.size.resampling,
        *_texts(folder),
    )


def square_side(vision: Mapping[str, Any], key: str, default: int) -> int:
    """Returns the side of a square in vision_config, a number or two equal ones. Raises InvalidArgument for others."""
    value = vision.get(key) or default
    sides = value if isinstance(value, list) else [value]
    if len(set(sides)) != 1 or not isinstance(sides[0], int):
        text = f"config.json: vision_config.{key} is {value!r}: a whole number, or two equal ones, is needed"
        raise InvalidArgument(text, field="model")
    return sides[0]


def check_tile_side(height: int, width: int, side: int) -> None:
    """Raises InvalidArgument if the tiles of the processor are not the pictures of the vision tower."""
    if (height, width) != (side, side):
        raise InvalidArgument(
            f"preprocessor_config.json: tiles have {height} x {width} pixels, and vision_config.image_size is {side}. "
            "They must be equal.",
            field="model",
        )


def _tile_bounds(folder: Path) -> tuple[int, int]:
    """Returns the least and the largest number of tiles, the whole picture aside. Raises InvalidArgument for bounds
    that contradict each other."""
    values, name = read_values(folder)
    least, most = values.get("min_patches") or MIN_TILES, values.get("max_patches") or MAX_TILES
    if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most <= LARGEST_BOUND):
        text = (
            f"{name}: min_patches is {least!r} and max_patches {most!r}; 1 <= min <= max <= {LARGEST_BOUND} is needed"
        )
        raise InvalidArgument(text, field="model")
    return least, most


def _texts(folder: Path) -> tuple[str, str]:
    """Returns the texts of the tokens around a picture's."""
    settings = read_settings(folder)
    named = {**(settings.get("extra_special_tokens") or {}), **settings}
    return named.get("start_image_token", "<img>"), named.get("end_image_token", "</img>")
