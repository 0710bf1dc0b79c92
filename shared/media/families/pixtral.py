"""Pixtral and Mistral 3: pictures of any aspect, one token for each patch or each square of patches, and a token after
each row (arXiv 2410.07073, section 2.2)."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import read_normalization, read_resampling, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

LONGEST_EDGE = 1024  # transformers' default


@dataclass(frozen=True, slots=True)
class PixtralProcessor:
    """Scales pictures down to a largest height and width, and each side up to a multiple of one token's pixels."""

    placeholder: int
    normalization: Normalization
    max_height: int  # pixels, before sides are rounded up
    max_width: int
    cell: int  # pixels on a side of the square that one token stands for
    resampling: str
    row_end: str  # texts of the tokens after each row and after the last one
    picture_end: str

    @property
    def max_embeddings(self) -> int:
        return -(-self.max_height // self.cell) * -(-self.max_width // self.cell)

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns the picture as one tile. Raises InvalidArgument for unknown options and for pictures whose shorter
        side would vanish."""
        max_height, max_width = self._bounds(options)
        ratio = max(height / max_height, width / max_width)
        if ratio > 1:
            height, width = int(height / ratio), int(width / ratio)
        if not height or not width:
            raise InvalidArgument(
                f"a picture's sides differ by a factor of more than {max(max_height, max_width)}, so that its shorter "
                "one has less than a pixel; crop it",
                field="messages",
            )
        rows, columns = -(-height // self.cell), -(-width // self.cell)
        return TileLayout(1, rows * self.cell, columns * self.cell)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled picture, [1, height, width, 3]."""
        from quire.shared.media.rendering import resized

        return resized(picture, layout.height, layout.width, self.resampling)[None]

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the rows of placeholders, each with its end token."""
        rows, columns = layout.height // self.cell, layout.width // self.cell
        row_end, picture_end = (_token(tokenizer, text) for text in (self.row_end, self.picture_end))
        row = (*(self.placeholder,) * columns, row_end)
        tokens = (*(row * rows)[:-1], picture_end)
        return PlaceholderExpansion(tokens, tuple((index * (columns + 1), columns) for index in range(rows)))

    def _bounds(self, options: Mapping[str, Any]) -> tuple[int, int]:
        """Returns the largest height and width, which the option `size` lowers. Raises InvalidArgument for other
        options and sizes."""
        for name in options:
            if name != "size":
                raise InvalidArgument(
                    f"mm_processor_kwargs.{name}: this model's processor has no such option; it has size",
                    field="mm_processor_kwargs",
                )
        if "size" not in options:
            return self.max_height, self.max_width
        bounds = _bounds_in(options["size"])
        if bounds is None or bounds[0] > self.max_height or bounds[1] > self.max_width:
            raise InvalidArgument(
                f"mm_processor_kwargs.size is {options['size']!r}; longest_edge, or height and width, is needed, up to "
                f"{self.max_height} x {self.max_width} pixels",
                field="mm_processor_kwargs",
            )
        return bounds


def make_pixtral(folder: Path, config: Mapping[str, Any]) -> PixtralProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    values, name = read_values(folder)
    vision, whole = config["vision_config"], _whole_processor(folder)
    bounds = _bounds_in(values.get("size") or {"longest_edge": LONGEST_EDGE})
    if bounds is None:
        text = f"{name}: size is {values.get('size')!r}; longest_edge, or height and width, is needed"
        raise InvalidArgument(text, field="model")
    placeholder = config.get("image_token_index", config.get("image_token_id", 10))
    if not isinstance(placeholder, int):
        raise InvalidArgument(f"config.json: image_token_index is {placeholder!r}, not a token id", field="model")
    merged = int(config.get("spatial_merge_size", 2)) if config.get("model_type") == "mistral3" else 1
    return PixtralProcessor(
        placeholder,
        read_normalization(values, name),
        *bounds,
        int(vision.get("patch_size", 16)) * merged,
        read_resampling(values, name),
        whole.get("image_break_token", "[IMG_BREAK]"),
        whole.get("image_end_token", "[IMG_END]"),
    )


def _whole_processor(folder: Path) -> dict[str, Any]:
    """Reads processor_config.json, the settings of the processor of texts and pictures together; empty if the folder
    has none."""
    path = folder / "processor_config.json"
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return found


def _bounds_in(size: object) -> tuple[int, int] | None:
    """Returns the largest height and width that a `size` gives; None if it gives none."""
    if isinstance(size, int):
        size = {"longest_edge": size}
    if not isinstance(size, dict):
        return None
    longest = size.get("longest_edge")
    bounds = (longest, longest) if longest else (size.get("height"), size.get("width"))
    height, width = bounds
    if not (isinstance(height, int) and isinstance(width, int)) or min(height, width) < 1:
        return None
    return height, width


def _token(tokenizer: PromptTokenizer, text: str) -> int:
    """Returns the token of `text`. Raises InvalidArgument if it is not one token."""
    tokens = tokenizer.encode(text)
    if len(tokens) != 1:
        raise InvalidArgument(
            f"the tokenizer has no token {text!r}, which ends rows of pictures: its files are of another model",
            field="model",
        )
    return tokens[0]
