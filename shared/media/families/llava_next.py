"""LLaVA-NeXT and LLaVA-OneVision: the whole picture, and the picture on the best of some canvases, cut into tiles; one
token for each patch that shows it, and one after each row of patches."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.internvl import check_tile_side
from quire.shared.media.picture_sizes import read_processor, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout, no_options

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

NEXT_CANVASES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))  # height, width; transformers' default
ONEVISION_CANVASES = tuple((384 * rows, 384 * columns) for rows in range(1, 7) for columns in range(1, 7))
MAX_CANVAS = 1 << 14  # pixels on a side
SCALED_FROM = 1.1  # times the largest side of the grid of patches, from which on it is scaled down


class AnyResLayout(NamedTuple):
    """Grid of tiles and of the patches that show the picture: TileLayout.numbers of these families."""

    rows: int  # of tiles
    columns: int
    top: int  # rows of patches cut off above, and as many below
    left: int  # columns of patches cut off on either side
    height: int  # rows of patches after the cut and after they are scaled
    width: int


@dataclass(frozen=True, slots=True)
class AnyResProcessor:
    """Renders the whole picture as a first tile, then cuts it into tiles of the tower's size."""

    placeholder: int
    normalization: Normalization
    side: int  # of a tile, in pixels
    patches: int  # on a tile's side
    canvases: tuple[tuple[int, int], ...]  # height and width, in pixels
    max_tiles: int  # the grid of patches is scaled down to as many tiles' patches; 0: never
    resampling: str

    @property
    def max_embeddings(self) -> int:
        """Largest number of rows of one item, without regard to aspects."""
        return self.patches**2 + max(map(self._most_rows, self.canvases))

    def _most_rows(self, canvas: tuple[int, int]) -> int:
        """Returns an upper bound of the rows of the encoder for a picture on one canvas, without its first tile."""
        height, width = (size // self.side * self.patches for size in canvas)
        if not self.max_tiles:
            return height * (width + 1)
        return min(height * width, int(SCALED_FROM**2 * self.max_tiles * self.patches**2)) + height

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans canvas, tiles and patches. `numbers`: those of AnyResLayout. Raises InvalidArgument for options."""
        no_options(options)
        canvas = best_canvas(height, width, self.canvases)
        rows, columns = canvas[0] // self.side, canvas[1] // self.side
        top, left = _padding(height, width, rows * self.patches, columns * self.patches)
        shown = rows * self.patches - 2 * top, columns * self.patches - 2 * left
        layout = AnyResLayout(rows, columns, top, left, *self._scaled(*shown))
        return TileLayout(1 + rows * columns, self.side, self.side, tuple(layout))

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Returns the grid of patches, scaled down if it is much larger than max_tiles tiles."""
        if not self.max_tiles:
            return height, width
        ratio = math.sqrt(height * width / (self.max_tiles * self.patches**2))
        return (int(height // ratio), int(width // ratio)) if ratio > SCALED_FROM else (height, width)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the whole picture without regard to its aspect, then the tiles of the canvas by rows, [num_tiles,
        side, side, 3]."""
        import numpy as np

        from quire.shared.media.tiling import cut, on_canvas, scaled

        grid = AnyResLayout(*layout.numbers)
        canvas = grid.rows * self.side, grid.columns * self.side
        height, width = _fitted(picture.height, picture.width, *canvas)
        fitted = scaled(picture, height, width, self.resampling)
        padded = on_canvas(fitted, *canvas, (canvas[0] - height) // 2, (canvas[1] - width) // 2)
        whole = np.asarray(scaled(picture, self.side, self.side, self.resampling), dtype=np.uint8)
        return np.concatenate((whole[None], cut(padded, self.side, self.side)))

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each row."""
        grid = AnyResLayout(*layout.numbers)
        num_rows = self.patches**2 + grid.height * (grid.width + 1)
        return PlaceholderExpansion((self.placeholder,) * num_rows, ((0, num_rows),))


def best_canvas(height: int, width: int, canvases: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the canvas (height, width) that keeps the most of the picture's pixels; of several such the smallest, and
    of equal ones the first."""

    def quality(canvas: tuple[int, int]) -> tuple[int, int]:
        scale = min(canvas[1] / width, canvas[0] / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        return kept, kept - canvas[0] * canvas[1]

    return max(canvases, key=quality)


def _fitted(height: int, width: int, canvas_height: int, canvas_width: int) -> tuple[int, int]:
    """Returns height and width of the picture that fills one side of a canvas, in its aspect."""
    scale_down, scale_across = canvas_height / height, canvas_width / width
    if scale_across < scale_down:
        return min(math.ceil(height * scale_across), canvas_height), canvas_width
    return canvas_height, min(math.ceil(width * scale_down), canvas_width)


def _padding(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Returns rows and columns of patches, of `rows` x `columns`, that show padding on either side of the picture."""
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2


def make_llava_next(folder: Path, config: Mapping[str, Any]) -> AnyResProcessor:
    """Returns the processor of a LLaVA-NeXT model. Raises InvalidArgument if its files do not fit together."""
    return _make(folder, config, 32_000, NEXT_CANVASES, 0)


def make_llava_onevision(folder: Path, config: Mapping[str, Any]) -> AnyResProcessor:
    """Returns the processor of a LLaVA-OneVision model. Each picture is cut into tiles, also if a prompt has several.
    Raises InvalidArgument if its files do not fit together."""
    aspect = config.get("vision_aspect_ratio") or "anyres_max_9"
    most = aspect.removeprefix("anyres_max_")
    if not most.isdecimal() or not int(most):
        text = f"config.json: vision_aspect_ratio is {aspect!r}; 'anyres_max_' and a number is supported"
        raise InvalidArgument(text, field="model")
    return _make(folder, config, 151_646, ONEVISION_CANVASES, int(most))


def _make(
    folder: Path,
    config: Mapping[str, Any],
    image_token: int,
    canvases: tuple[tuple[int, int], ...],
    max_tiles: int,
) -> AnyResProcessor:
    """Returns the processor of a model. `image_token`, `canvases`: transformers' defaults of the family. Raises
    InvalidArgument if its files do not fit together."""
    pictures, vision = read_processor(folder), config["vision_config"]
    side = int(vision.get("image_size", 336))
    check_tile_side(pictures.size.height, pictures.size.width, side)
    return AnyResProcessor(
        config.get("image_token_index", config.get("image_token_id", image_token)),
        Normalization(pictures.mean, pictures.std, pictures.factor),
        side,
        side // int(vision.get("patch_size", 14)),
        _canvases(folder, config, side, canvases),
        max_tiles,
        pictures.size.resampling,
    )


def _canvases(
    folder: Path, config: Mapping[str, Any], side: int, default: tuple[tuple[int, int], ...]
) -> tuple[tuple[int, int], ...]:
    """Returns the canvases of a model. Raises InvalidArgument for sizes that tiles do not fill, and if the processor
    has others than the model."""
    values, name = read_values(folder)
    found = values.get("image_grid_pinpoints") or default
    if (expected := config.get("image_grid_pinpoints")) and _comparable(expected) != _comparable(found):
        text = f"image_grid_pinpoints in {name} and config.json are {found!r} and {expected!r}; they must be equal"
        raise InvalidArgument(text, field="model")
    for one in found:
        sizes = list(one) if isinstance(one, (list, tuple)) else []
        if len(sizes) != 2 or not all(
            isinstance(size, int) and size % side == 0 and side <= size <= MAX_CANVAS for size in sizes
        ):
            text = f"{name}: image_grid_pinpoints has {one!r}; a height and a width are needed, multiples of {side}"
            raise InvalidArgument(f"{text} up to {MAX_CANVAS}", field="model")
    return tuple((one[0], one[1]) for one in found)


def _comparable(pinpoints: object) -> str:
    """Returns a text that is equal for equal image_grid_pinpoints, be they lists or tuples."""
    return json.dumps(pinpoints)
