"""Idefics 3 and SmolVLM: pictures are scaled to a longest edge and cut into square tiles, then the whole picture; each
tile follows the tokens of its row and column."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.internvl import check_tile_side
from quire.shared.media.options import check_names, read_flag, read_longest_edge
from quire.shared.media.picture_sizes import read_normalization, read_resampling, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

IMAGE_TOKEN = 128_257  # transformers' default
AROUND, WHOLE = "<fake_token_around_image>", "<global-img>"
HALF = (0.5, 0.5, 0.5)  # mean and standard deviation
LANCZOS = 1
MAX_EDGE = 4096  # pixels; of the scaled picture, in any file
DEFAULT_EDGE, DEFAULT_TILE = 4 * 364, 364  # transformers' defaults
OPTIONS = ("do_image_splitting", "size")


@dataclass(frozen=True, slots=True)
class Idefics3Processor:
    """Cuts pictures into tiles of the tower's size."""

    placeholder: int
    normalization: Normalization
    side: int  # of a tile, in pixels
    tile_embeddings: int
    longest_edge: int  # of the scaled picture, in pixels
    splits: bool  # cuts pictures into tiles, unless a request says otherwise
    resampling: str

    @property
    def max_embeddings(self) -> int:
        return self.tile_embeddings * (math.ceil(self.longest_edge / self.side) ** 2 + 1)

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans the grid of tiles. `numbers`: its rows and columns, 0 for the whole picture alone, then height and
        width to which the picture is scaled first. Raises InvalidArgument for unknown options and larger sizes."""
        check_names(options, *OPTIONS)
        edge = read_longest_edge(options, "size", self.longest_edge, self.longest_edge)
        height, width = scaled_to_edge(height, width, edge)
        rows, columns = 0, 0
        if read_flag(options, "do_image_splitting", self.splits):
            rows, columns = self._grid(height, width)
        num_tiles = rows * columns + 1
        return TileLayout(num_tiles, self.side, self.side, (rows, columns, height, width))

    def _grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns rows and columns of the tiles that cover a picture; 0 and 0 if one covers it."""
        aspect, side = width / height, self.side
        if width >= height:
            columns = math.ceil(width / side)
            rows = math.ceil(int(columns * side / aspect) / side)
        else:
            rows = math.ceil(height / side)
            columns = math.ceil(int(rows * side * aspect) / side)
        rows, columns = max(rows, 1), max(columns, 1)
        return (0, 0) if rows * columns == 1 else (rows, columns)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tiles by rows, then the whole picture without regard to its aspect, [num_tiles, side, side,
        3]."""
        import numpy as np

        from quire.shared.media.tiling import cut, scaled

        rows, columns, height, width = layout.numbers
        picture = scaled(picture, height, width, self.resampling)
        tiles = []
        if rows:
            picture = scaled(picture, rows * self.side, columns * self.side, self.resampling)
            tiles.append(cut(picture, self.side, self.side))
        whole = np.asarray(scaled(picture, self.side, self.side, self.resampling), dtype=np.uint8)
        return np.concatenate((*tiles, whole[None]))

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the tokens of each tile: those of the text before it, then one placeholder for each of its rows."""
        tokens: list[int] = []
        runs: list[tuple[int, int]] = []
        for text in _texts(*layout.numbers[:2]):
            tokens += tokenizer.encode(text)
            runs.append((len(tokens), self.tile_embeddings))
            tokens += [self.placeholder] * self.tile_embeddings
        tokens += tokenizer.encode(AROUND)
        return PlaceholderExpansion(tuple(tokens), tuple(runs))


def _texts(rows: int, columns: int) -> Iterator[str]:
    """Yields the texts before the tiles of a picture and before the whole picture."""
    for row in range(rows):
        for column in range(columns):
            line_break = "\n" if row and not column else ""
            yield f"{line_break}{AROUND}<row_{row + 1}_col_{column + 1}>"
    yield ("\n\n" if rows else "") + AROUND + WHOLE


def scaled_to_edge(height: int, width: int, edge: int) -> tuple[int, int]:
    """Returns height and width of a picture whose longer edge has `edge` pixels, at most MAX_EDGE; the shorter one is
    even unless it is shorter than a pixel."""
    aspect = width / height
    if width >= height:
        height, width = _even(int(edge / aspect)), edge
    else:
        height, width = edge, _even(int(edge * aspect))
    height, width = max(height, 1), max(width, 1)
    aspect = width / height
    if width >= height and width > MAX_EDGE:
        height, width = int(MAX_EDGE / aspect), MAX_EDGE
    elif height > width and height > MAX_EDGE:
        height, width = MAX_EDGE, int(MAX_EDGE * aspect)
    return max(height, 1), max(width, 1)


def _even(size: int) -> int:
    """Rounds `size` up to an even number."""
    return size + size % 2


def make_idefics3(folder: Path, config: Mapping[str, Any]) -> Idefics3Processor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    values, name = read_values(folder)
    vision = config["vision_config"]
    side, patch = int(vision.get("image_size", 224)), int(vision.get("patch_size", 32))
    tile = _edge(values, "max_image_size", DEFAULT_TILE, name)
    check_tile_side(tile, tile, side)
    return Idefics3Processor(
        config.get("image_token_id", IMAGE_TOKEN),
        read_normalization(values, name, HALF, HALF),
        side,
        (side // patch // int(config.get("scale_factor", 2))) ** 2,
        _edge(values, "size", DEFAULT_EDGE, name),
        values.get("do_image_splitting") is not False,
        read_resampling(values, name, LANCZOS),
    )


def _edge(values: Mapping[str, Any], key: str, default: int, name: str) -> int:
    """Returns the longest edge that a setting of the file `name` gives, in pixels. Raises InvalidArgument for other
    forms."""
    found = values.get(key) or {"longest_edge": default}
    edge = found.get("longest_edge") if isinstance(found, dict) else found
    if not isinstance(edge, int) or not 1 <= edge <= MAX_EDGE:
        text = f'{name}: {key} is {found!r}; {{"longest_edge": pixels}} is needed, from 1 to {MAX_EDGE}'
        raise InvalidArgument(text, field="model")
    return edge
