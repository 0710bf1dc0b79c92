"""Llama 4: pictures are scaled to fit a grid of tiles, then the whole picture if there are several; tokens separate
tiles and rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.internvl import check_tile_side, square_side
from quire.shared.media.options import check_names, read_count, read_flag
from quire.shared.media.picture_sizes import read_normalization, read_resampling, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout
from quire.shared.media.special_tokens import single_token, token_id

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

IMAGE, IMAGE_ID = "<|image|>", 200_090  # written by the template, and before the whole picture
PATCH_ID = 200_092
START, END = "<|image_start|>", "<|image_end|>"
NEXT_TILE, NEXT_ROW = "<|tile_x_separator|>", "<|tile_y_separator|>"
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation
BILINEAR = 2
DEFAULT_SIDE, DEFAULT_TILES, LARGEST_BOUND = 336, 16, 256
OPTIONS = ("max_patches", "resize_to_max_canvas")


@dataclass(frozen=True, slots=True)
class Llama4Processor:
    """Cuts pictures into tiles of the tower's size."""

    placeholder: int
    patch: int  # token that takes a row
    normalization: Normalization
    side: int  # of a tile, in pixels
    tile_embeddings: int
    max_tiles: int
    fills_canvas: bool  # scales small pictures up to the largest canvas, unless a request says otherwise
    resampling: str

    @property
    def max_embeddings(self) -> int:
        return self.tile_embeddings * (self.max_tiles + (self.max_tiles > 1))

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans the grid of tiles. `numbers`: its rows and columns, then height and width of the scaled picture. Raises
        InvalidArgument for unknown options and more tiles than the model allows."""
        check_names(options, *OPTIONS)
        most = read_count(options, "max_patches", self.max_tiles, self.max_tiles)
        fills = read_flag(options, "resize_to_max_canvas", self.fills_canvas)
        rows, columns = best_grid(height, width, self.side, most, fills_canvas=fills)
        box = rows * self.side, columns * self.side
        if not fills:  # a picture is scaled up to one tile at most
            box = min(max(height, self.side), box[0]), min(max(width, self.side), box[1])
        num_tiles = rows * columns
        numbers = (rows, columns, *_fitted(height, width, *box))
        return TileLayout(num_tiles + (num_tiles > 1), self.side, self.side, numbers)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tiles by rows, black around the picture, then the whole picture without regard to its aspect,
        [num_tiles, side, side, 3]."""
        import numpy as np

        from quire.shared.media.tiling import cut, on_canvas, scaled

        rows, columns, height, width = layout.numbers
        fitted = scaled(picture, height, width, self.resampling)
        tiles = cut(on_canvas(fitted, rows * self.side, columns * self.side, 0, 0), self.side, self.side)
        if len(tiles) == 1:
            return tiles
        whole = np.asarray(scaled(picture, self.side, self.side, self.resampling), dtype=np.uint8)
        return np.concatenate((tiles, whole[None]))

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the tokens of the tiles with their separators, then those of the whole picture."""
        start, end, next_tile, next_row = (single_token(tokenizer, text) for text in (START, END, NEXT_TILE, NEXT_ROW))
        columns = layout.numbers[1]
        tokens, runs = [start], []
        for tile in range(layout.num_tiles):
            if tile == layout.num_tiles - 1:
                tokens.append(self.placeholder)
            runs.append((len(tokens), self.tile_embeddings))
            tokens += [self.patch] * self.tile_embeddings
            if tile < layout.num_tiles - 1:
                tokens.append(next_row if (tile + 1) % columns == 0 else next_tile)
        return PlaceholderExpansion((*tokens, end), tuple(runs))


def best_grid(height: int, width: int, side: int, most: int, *, fills_canvas: bool) -> tuple[int, int]:
    """Returns rows and columns of the grid with at most `most` tiles that a picture fits best.

    Grids on which it need not be scaled down come first, of those the one that scales it up least (`fills_canvas`:
    most); otherwise the one that scales it down least. The smallest of equal ones is taken.
    """
    scales = {grid: min(grid[0] * side / height, grid[1] * side / width) for grid in _grids(most)}
    large = [scale for scale in scales.values() if scale >= 1]
    chosen = max(scales.values()) if not large or fills_canvas else min(large)
    return min((grid for grid, scale in scales.items() if scale == chosen), key=math.prod)


@cache
def _grids(most: int) -> tuple[tuple[int, int], ...]:
    """Returns rows and columns of all grids with at most `most` tiles, by falling number of tiles."""
    return tuple(
        (rows, tiles // rows) for tiles in range(most, 0, -1) for rows in range(1, tiles + 1) if not tiles % rows
    )


def _fitted(height: int, width: int, box_height: int, box_width: int) -> tuple[int, int]:
    """Returns height and width of the largest picture in a box, in its aspect, at least one pixel each."""
    scale_down, scale_across = box_height / height, box_width / width
    if scale_across < scale_down:
        return max(min(math.floor(height * scale_across), box_height), 1), box_width
    return box_height, max(min(math.floor(width * scale_down), box_width), 1)


def make_llama4(folder: Path, config: Mapping[str, Any]) -> Llama4Processor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    values, name = read_values(folder)
    vision, size = config["vision_config"], values.get("size") or {"height": DEFAULT_SIDE, "width": DEFAULT_SIDE}
    side, patch = square_side(vision, "image_size", 448), square_side(vision, "patch_size", 14)
    check_tile_side(size.get("height", 0), size.get("width", 0), side)
    most = values.get("max_patches") or DEFAULT_TILES
    if not isinstance(most, int) or not 1 <= most <= LARGEST_BOUND:
        text = f"{name}: max_patches is {most!r}; a whole number from 1 to {LARGEST_BOUND} is needed"
        raise InvalidArgument(text, field="model")
    return Llama4Processor(
        token_id(folder, IMAGE, IMAGE_ID),
        config.get("image_token_index", config.get("image_token_id", PATCH_ID)),
        read_normalization(values, name, HALF, HALF),
        side,
        round((side // patch * vision.get("pixel_shuffle_ratio", 0.5)) ** 2),
        most,
        values.get("resize_to_max_canvas") is True,
        read_resampling(values, name, BILINEAR),
    )
