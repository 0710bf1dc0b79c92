"""Phi-4-multimodal: pictures are scaled into a grid of tiles with white padding; tokens for the squares of patches that
show the picture, and for the whole picture."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.internvl import check_tile_side, nearest_grid
from quire.shared.media.options import check_names, read_count
from quire.shared.media.picture_sizes import read_normalization, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

IMAGE_TOKEN, DEFAULT_SIDE, DEFAULT_PATCH, DEFAULT_TILES = 200_010, 448, 14, 36  # transformers' defaults
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation
LEAST_SIDE = 10  # pixels of a scaled picture
LARGEST_BOUND = 256  # tiles; accepted in files
POOLED = 2  # patches on a side of the square that one token stands for
WHITE = (255, 255, 255)


class PaddedLayout(NamedTuple):
    """Grid of tiles and of the patches that show the picture: TileLayout.numbers of this family."""

    rows: int  # of tiles
    columns: int
    shown_rows: int  # of patches, over all tiles
    shown_columns: int


@dataclass(frozen=True, slots=True)
class Phi4Processor:
    """Cuts pictures into tiles of the tower's size."""

    placeholder: int
    normalization: Normalization
    side: int  # of a tile, in pixels
    patch: int
    max_tiles: int

    @property
    def max_embeddings(self) -> int:
        base = self.side // self.patch // POOLED
        return base * base * self.max_tiles + base * self.max_tiles + 1 + base * (base + 1)

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans tiles and patches. `numbers`: those of PaddedLayout. Raises InvalidArgument for unknown options and for
        pictures that are too elongated."""
        check_names(options, "dynamic_hd")
        most = read_count(options, "dynamic_hd", self.max_tiles, self.max_tiles)
        rows, columns = math.ceil(height / self.side), math.ceil(width / self.side)
        if rows * columns > most:
            rows, columns = nearest_grid(height, width, self.side, 1, most)
        fitted = self._fitted(height, width, rows, columns)
        if min(fitted) < LEAST_SIDE:
            text = f"the aspect ratio of a picture is very extreme: {height} x {width} pixels become "
            raise InvalidArgument(f"{text}{fitted[0]} x {fitted[1]}, less than {LEAST_SIDE}; crop it", field="messages")
        shown = (
            tiles * (self.side // self.patch) - (tiles * self.side - size) // self.patch
            for tiles, size in zip((rows, columns), fitted, strict=True)
        )
        return TileLayout(rows * columns, self.side, self.side, tuple(PaddedLayout(rows, columns, *shown)))

    def _fitted(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """Returns height and width of the picture that fills one side of the tiles, in its aspect."""
        down, across = rows * self.side / height, columns * self.side / width
        if across < down:
            return int(height * across), columns * self.side
        return rows * self.side, int(width * down)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tiles by rows, white around the picture, [num_tiles, side, side, 3]."""
        from quire.shared.media.tiling import cut, on_canvas, scaled

        grid = PaddedLayout(*layout.numbers)
        fitted = scaled(picture, *self._fitted(picture.height, picture.width, grid.rows, grid.columns), "bilinear")
        canvas = on_canvas(fitted, grid.rows * self.side, grid.columns * self.side, 0, 0, colour=WHITE)
        return cut(canvas, self.side, self.side)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each row."""
        grid, base = PaddedLayout(*layout.numbers), self.side // self.patch // POOLED
        rows, columns = math.ceil(grid.shown_rows / POOLED), math.ceil(grid.shown_columns / POOLED)
        num_rows = rows * (columns + 1) + 1 + base * (base + 1)
        return PlaceholderExpansion((self.placeholder,) * num_rows, ((0, num_rows),))


def make_phi4_multimodal(folder: Path, config: Mapping[str, Any]) -> Phi4Processor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    values, name = read_values(folder)
    vision, size = config["vision_config"], values.get("size") or {"height": DEFAULT_SIDE, "width": DEFAULT_SIDE}
    side, patch = int(vision.get("image_size", DEFAULT_SIDE)), int(vision.get("patch_size", DEFAULT_PATCH))
    check_tile_side(size.get("height", 0), size.get("width", 0), side)
    most = values.get("dynamic_hd") or DEFAULT_TILES
    if not isinstance(most, int) or not 1 <= most <= LARGEST_BOUND:
        text = f"{name}: dynamic_hd is {most!r}; a whole number from 1 to {LARGEST_BOUND} is needed"
        raise InvalidArgument(text, field="model")
    normalization = read_normalization(values, name, HALF, HALF)
    return Phi4Processor(vision.get("image_token_id", IMAGE_TOKEN), normalization, side, patch, most)
