"""Cohere2 Vision: pictures are scaled to the grid of tiles that needs the least change of size; with several tiles the
whole picture is the last one."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.internvl import check_tile_side, square_side
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

IMAGE_TOKEN = 255_036  # transformers' defaults, as the numbers below
MAX_TILES, DOWNSAMPLING = 12, 2
TILE_ROWS = 16  # rows of embeddings of a tile on a side: `patch_size` of the processor
LARGEST_BOUND = 256  # accepted in files
OPTIONS = ("crop_to_patches", "min_patches", "max_patches")  # min_patches has no effect in transformers either
# Names of tokens in tokenizer_config.json, and their texts.
START, END, LINE = (
    ("boi_token", "<|START_OF_IMG|>"),
    ("eoi_token", "<|END_OF_IMG|>"),
    ("img_line_break_token", "<|IMG_LINE_BREAK|>"),
)


@dataclass(frozen=True, slots=True)
class Cohere2VisionProcessor:
    """Cuts pictures into tiles of the tower's size."""

    placeholder: int
    normalization: Normalization
    side: int  # of a tile, in pixels
    tile_embeddings: int
    max_tiles: int
    crops: bool  # unless a request says otherwise
    resampling: str
    texts: tuple[str, str, str]  # of the tokens before a picture, after it, and after each tile

    @property
    def max_embeddings(self) -> int:
        return self.tile_embeddings * (self.max_tiles + (self.max_tiles > 1))

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans the grid of tiles. `numbers`: its rows and columns. Raises InvalidArgument for unknown options and
        numbers of tiles that the model does not allow."""
        check_names(options, *OPTIONS)
        most = read_count(options, "max_patches", self.max_tiles, self.max_tiles)
        read_count(options, "min_patches", 1, most)
        crops = read_flag(options, "crop_to_patches", self.crops)
        rows, columns = closest_grid(height, width, self.side, most) if crops else (1, 1)
        num_tiles = rows * columns
        return TileLayout(num_tiles + (num_tiles > 1), self.side, self.side, (rows, columns))

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tiles by rows, then the whole picture, [num_tiles, side, side, 3]."""
        from quire.shared.media.tiling import cut_with_whole

        rows, columns = layout.numbers
        return cut_with_whole(picture, rows, columns, self.side, self.resampling)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the start token, the placeholder once for each row with a token after each tile, and the end
        token."""
        start, end, line = (single_token(tokenizer, text) for text in self.texts)
        count = self.tile_embeddings
        tokens = (start, *((self.placeholder,) * count + (line,)) * layout.num_tiles, end)
        return PlaceholderExpansion(tokens, tuple((1 + i * (count + 1), count) for i in range(layout.num_tiles)))


def closest_grid(height: int, width: int, side: int, most: int) -> tuple[int, int]:
    """Returns rows and columns of the grid with up to `most` tiles that the picture fills with the least enlargement,
    or, if it is larger than all grids, with the least reduction; the first of equal ones, by tiles, then by columns."""
    best, least = (1, 1), float("inf")
    for columns, rows in _grids(most):
        scale = min(columns * side / width, rows * side / height)
        cost = scale if scale >= 1 else 2 * LARGEST_SCALE - scale
        if cost < least:
            best, least = (rows, columns), cost
    return best


LARGEST_SCALE = 1e9  # of a picture of one pixel, and more: reductions cost more than every enlargement


@cache
def _grids(most: int) -> tuple[tuple[int, int], ...]:
    """Returns the columns and rows of all grids with up to `most` tiles, ordered by tiles, then by columns."""
    grids = ((columns, rows) for columns in range(1, most + 1) for rows in range(1, most // columns + 1))
    return tuple(sorted(grids, key=lambda one: (one[0] * one[1], one[0])))


def make_cohere2_vision(folder: Path, config: Mapping[str, Any]) -> Cohere2VisionProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    pictures, vision = read_processor(folder), config["vision_config"]
    side = square_side(vision, "image_size", 512)
    check_tile_side(pictures.size.height, pictures.size.width, side)
    values, name = read_values(folder)
    rows = values.get("patch_size") or TILE_ROWS
    needed = side // square_side(vision, "patch_size", 16) // (config.get("downsample_factor") or DOWNSAMPLING)
    if rows != needed:
        text = f"{name}: patch_size is {rows!r}, and a tile has {needed} rows of embeddings; they must be equal"
        raise InvalidArgument(text, field="model")
    most = values.get("max_patches") or MAX_TILES
    if not isinstance(most, int) or not 1 <= most <= LARGEST_BOUND:
        text = f"{name}: max_patches is {most!r}; a whole number from 1 to {LARGEST_BOUND} is needed"
        raise InvalidArgument(text, field="model")
    settings = read_settings(folder)
    named = {**(settings.get("extra_special_tokens") or {}), **settings}
    return Cohere2VisionProcessor(
        config.get("image_token_id", IMAGE_TOKEN),
        Normalization(pictures.mean, pictures.std, pictures.factor),
        side,
        needed * needed,
        most,
        values.get("crop_to_patches") is not False,
        pictures.size.resampling,
        tuple(str(named.get(key, text)) for key, text in (START, END, LINE)),  # type: ignore[arg-type]
    )
