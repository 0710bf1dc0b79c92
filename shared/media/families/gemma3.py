"""Gemma 3 (arXiv 2503.19786, section 2.2): pictures of one size, and optionally crops of elongated ones (pan and
scan)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import PictureProcessor, read_processor, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

BEGIN, END, SOFT, EMBEDDINGS = 255_999, 256_000, 262_144, 256  # transformers' defaults
MOST_NEWLINES = 31  # in one token of Gemma's vocabulary
BEFORE_PICTURE, BEFORE_CROPS = "Here is the original image ", " and here are some crops to help you see better "


class PanAndScan(NamedTuple):
    """Settings of the crops, named as in preprocessor_config.json and mm_processor_kwargs after "pan_and_scan_"."""

    enabled: bool = False  # do_pan_and_scan
    min_crop_size: int = 256  # pixels
    max_num_crops: int = 4
    min_ratio_to_activate: float = 1.2  # of the longer side to the shorter one

    def num_crops(self, height: int, width: int) -> int:
        """Returns the number of crops along the longer side; 0: the picture is used as a whole only."""
        long, short = max(height, width), min(height, width)
        if not self.enabled or long / short < self.min_ratio_to_activate:
            return 0
        wanted = min(long // self.min_crop_size, math.floor(long / short + 0.5))
        count = min(self.max_num_crops, max(2, wanted))
        step = math.ceil(long / count)
        is_empty = (count - 1) * step >= long  # the last crop, of a picture of a few pixels
        return 0 if is_empty or min(step, short) < self.min_crop_size else count


@dataclass(frozen=True, slots=True)
class Gemma3Processor:
    """Scales the picture, and its crops, to the tower's input size."""

    placeholder: int  # begin of a picture; it stays in front of the soft tokens
    pictures: PictureProcessor
    num_soft_tokens: int  # of one tile
    soft_token: int
    end_token: int
    pan_and_scan: PanAndScan

    @property
    def normalization(self) -> Normalization:
        return Normalization(self.pictures.mean, self.pictures.std, self.pictures.factor)

    @property
    def max_embeddings(self) -> int:
        return self.num_soft_tokens * (1 + self.pan_and_scan.max_num_crops)

    @property
    def max_item_tokens(self) -> int:
        around = 2 + 2 * len("\n\n")  # of each tile; no tokenizer makes more tokens of a text than it has characters
        tiles = (1 + self.pan_and_scan.max_num_crops) * (self.num_soft_tokens + around + len(" "))
        return tiles + len(BEFORE_PICTURE) + len(BEFORE_CROPS)

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns the picture and its crops as tiles. Raises InvalidArgument for unknown options."""
        size = self.pictures.size
        num_crops = self._settings(options).num_crops(height, width)
        return TileLayout(1 + num_crops, size.height, size.width)

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled picture, then its scaled crops, [num_tiles, height, width, 3]."""
        import numpy as np

        from quire.shared.media.rendering import resized

        tiles = [picture, *_crops(picture, layout.num_tiles - 1)]
        return np.stack([resized(tile, layout.height, layout.width, self.pictures.size.resampling) for tile in tiles])

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the soft tokens of each tile between its begin and end tokens, with empty lines around, and sentences
        before the picture and before its crops if it has any."""
        around = tokenizer.encode("\n\n")
        tile = (*around, self.placeholder, *(self.soft_token,) * self.num_soft_tokens, self.end_token, *around)
        parts = [tile]
        if layout.num_tiles > 1:
            space = tuple(tokenizer.encode(" "))
            crops = [tile] + [part for _ in range(layout.num_tiles - 2) for part in (space, tile)]
            parts = [tuple(tokenizer.encode(BEFORE_PICTURE)), tile, tuple(tokenizer.encode(BEFORE_CROPS)), *crops]
        tokens = tuple(token for part in parts for token in part)
        starts = [at + 1 for at, token in enumerate(tokens) if token == self.placeholder]
        return PlaceholderExpansion(tokens, tuple((start, self.num_soft_tokens) for start in starts))

    def joined(self, left: int, right: int, tokenizer: PromptTokenizer) -> int | None:
        """Returns the token of the line feeds of two tokens together, as the tokenizer has one for each number of them;
        None for other tokens, and for too many line feeds."""
        by_count = {count: tokens[0] for count, tokens in _newlines(tokenizer) if len(tokens) == 1}
        counts = {token: count for count, token in by_count.items()}
        if left not in counts or right not in counts:
            return None
        return by_count.get(counts[left] + counts[right])

    def _settings(self, options: Mapping[str, Any]) -> PanAndScan:
        """Returns the model's settings, replaced by those of a request. Raises InvalidArgument for unknown options and
        values out of range."""
        for name in options:
            if name not in OPTIONS:
                raise InvalidArgument(
                    f"mm_processor_kwargs.{name}: this model's processor has no such option; it has "
                    f"{', '.join(OPTIONS)}",
                    field="mm_processor_kwargs",
                )
        return _read_settings(options, "mm_processor_kwargs", self.pan_and_scan, self.pan_and_scan.max_num_crops)


OPTIONS = ("do_pan_and_scan", *(f"pan_and_scan_{field}" for field in PanAndScan._fields[1:]))


def make_gemma3(folder: Path, config: Mapping[str, Any]) -> Gemma3Processor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    values, name = read_values(folder)
    pictures, side = read_processor(folder), int(config["vision_config"].get("image_size", 224))
    if (pictures.size.height, pictures.size.width) != (side, side):
        raise InvalidArgument(
            f"{name}: pictures have {pictures.size.height} x {pictures.size.width} pixels, and "
            f"vision_config.image_size is {side}. They must be equal.",
            field="model",
        )
    begin, soft, end = (
        _token_id(config, key, default)
        for key, default in (("boi_token", BEGIN), ("image_token", SOFT), ("eoi_token", END))
    )
    count = int(config.get("mm_tokens_per_image") or EMBEDDINGS)
    settings = _read_settings(values, name, PanAndScan(), math.inf)
    return Gemma3Processor(begin, pictures, count, soft, end, settings)


def _token_id(config: Mapping[str, Any], name: str, default: int) -> int:
    """Returns the token of config.json. Raises InvalidArgument for anything but a whole number."""
    found = config.get(f"{name}_index", config.get(f"{name}_id", default))
    if not isinstance(found, int):
        raise InvalidArgument(f"config.json: {name}_index is {found!r}, not a token id", field="model")
    return found


def _read_settings(values: Mapping[str, Any], where: str, base: PanAndScan, most_crops: float) -> PanAndScan:
    """Returns `base` with the settings among `values`; null leaves one as it is. Raises InvalidArgument, which names
    `where`, for values out of range."""
    found = dict(zip(PanAndScan._fields, (values.get(option) for option in OPTIONS), strict=True))
    settings = base._replace(**{field: value for field, value in found.items() if value is not None})
    valid = {
        OPTIONS[0]: isinstance(settings.enabled, bool),
        OPTIONS[1]: _is_whole(settings.min_crop_size) and settings.min_crop_size >= 1,
        OPTIONS[2]: _is_whole(settings.max_num_crops) and 1 <= settings.max_num_crops <= most_crops,
        OPTIONS[3]: isinstance(settings.min_ratio_to_activate, (int, float)) and settings.min_ratio_to_activate >= 0,
    }
    for (option, fits), needed in zip(valid.items(), _needed(most_crops), strict=True):
        if not fits:
            raise InvalidArgument(
                f"{where}.{option} is {values.get(option)!r}: {needed} is needed",
                field="model" if where != "mm_processor_kwargs" else where,
            )
    return settings


def _needed(most_crops: float) -> Iterable[str]:
    """Returns the values that each of OPTIONS takes, for errors."""
    count = "a number of crops from 1 on" if most_crops == math.inf else f"a number of crops from 1 to {most_crops}"
    return "true or false", "a number of pixels from 1 on", count, "a ratio from 0 on"


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _crops(picture: Image.Image, count: int) -> Iterable[Image.Image]:
    """Yields the picture's crops along its longer side, equal but for the last one, which may be smaller."""
    width, height = picture.size
    is_wide = width >= height
    step = math.ceil((width if is_wide else height) / max(count, 1))
    for index in range(count):
        first, last = index * step, (index + 1) * step
        box = (first, 0, min(last, width), height) if is_wide else (0, first, width, min(last, height))
        yield picture.crop(box)


def _newlines(tokenizer: PromptTokenizer) -> Iterable[tuple[int, list[int]]]:
    """Yields each number of line feeds up to MOST_NEWLINES with the tokens of their text."""
    return ((count, tokenizer.encode("\n" * count)) for count in range(1, MOST_NEWLINES + 1))
