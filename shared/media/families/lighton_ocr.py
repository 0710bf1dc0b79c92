"""LightOnOCR: pages scaled as for Pixtral, one token for each square of patches, and no tokens between rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.pixtral import PixtralProcessor, make_pixtral
from quire.shared.media.picture_sizes import read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

IMAGE_TOKEN, DEFAULT_UNIT = 151_655, 16  # transformers' defaults


@dataclass(frozen=True, slots=True)
class LightOnOcrProcessor:
    """Scales pages down to a largest size, and each side up to a multiple of the processor's unit."""

    placeholder: int
    pages: PixtralProcessor  # its cell is the unit of the scaled sides
    cell: int  # pixels on a side of the square that one token stands for

    @property
    def normalization(self) -> Normalization:
        return self.pages.normalization

    @property
    def max_embeddings(self) -> int:
        unit, largest = self.pages.cell, (self.pages.max_height, self.pages.max_width)
        rows, columns = (-(-side // unit) * unit // self.cell for side in largest)
        return rows * columns

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns the page as one tile. Raises InvalidArgument for unknown options and for pages with a side that is
        shorter than a square of patches."""
        layout = self.pages.layout(height, width, options)
        if min(layout.height, layout.width) < self.cell:
            raise InvalidArgument(
                f"a picture of {height} x {width} pixels becomes {layout.height} x {layout.width}, and the model needs "
                f"at least {self.cell} on each side; send a larger one",
                field="messages",
            )
        return layout

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled page, [1, height, width, 3]."""
        return self.pages.render(picture, layout)

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each square of patches."""
        num_rows = (layout.height // self.cell) * (layout.width // self.cell)
        return PlaceholderExpansion((self.placeholder,) * num_rows, ((0, num_rows),))


def make_lighton_ocr(folder: Path, config: Mapping[str, Any]) -> LightOnOcrProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    values, name = read_values(folder)
    unit = values.get("patch_size") or DEFAULT_UNIT
    sides = list(unit.values()) if isinstance(unit, dict) else [unit]
    if len(set(sides)) != 1 or not isinstance(sides[0], int) or sides[0] < 1:
        text = f"{name}: patch_size is {unit!r}: a whole number of pixels, or two equal ones, is needed"
        raise InvalidArgument(text, field="model")
    pages = make_pixtral(folder, config)
    cell = pages.cell * int(config.get("spatial_merge_size", 2))
    return LightOnOcrProcessor(config.get("image_token_id", IMAGE_TOKEN), replace(pages, cell=sides[0]), cell)
