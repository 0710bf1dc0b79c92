"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL: pictures keep their aspect, and a token stands for 2 x 2 patches."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import MOST_ASPECT, read_normalization, read_resampling, read_values
from quire.shared.media.processor import Normalization, PlaceholderExpansion, PromptTokenizer, TileLayout

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

FIELD, CONFIG = "mm_processor_kwargs", "config.json: vision_config"
MOST_SIDE = 1 << 14  # of a patch, in pixels
LEAST_PIXELS, MOST_PIXELS = 56 * 56, 28 * 28 * 1280  # of transformers' class
EDGES = {"shortest_edge": "min_pixels", "longest_edge": "max_pixels"}  # keys of `size`: areas, in spite of their names


class AreaBounds(NamedTuple):
    """Bounds of a resized picture's area, in pixels."""

    least: int
    most: int

    def replaced(self, values: Mapping[str, Any], field: str) -> AreaBounds:
        """Returns the bounds with those in `values`: min_pixels and max_pixels, or `size` with both edges. Raises
        InvalidArgument, naming `field`, for other values than positive integers, other keys of `size`, and a
        min_pixels above max_pixels."""
        size = values.get("size") or {}
        if not isinstance(size, dict) or not size.keys() <= {*EDGES, *EDGES.values()}:
            raise InvalidArgument(f"{field}: size is {size!r}; it may have {', '.join(EDGES)}", field=field)
        found = {EDGES.get(key, key): value for key, value in size.items()}
        found |= {name: values[name] for name in EDGES.values() if values.get(name) is not None}
        for name, value in found.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InvalidArgument(f"{field}: {name} is {value!r}; pixels, from 1 on, are needed", field=field)
        bounds = AreaBounds(found.get("min_pixels", self.least), found.get("max_pixels", self.most))
        if bounds.least > bounds.most:
            text = f"{field}: min_pixels is {bounds.least}, more than max_pixels, {bounds.most}; lower it"
            raise InvalidArgument(text, field=field)
        return bounds


class QwenVLProcessor:
    """Resizes each picture to multiples of a token's side, its area within bounds."""

    def __init__(
        self, bounds: AreaBounds, normalization: Normalization, placeholder: int, *, side: int, resampling: str
    ) -> None:
        """Makes the processor of a model. `side`: of a token, in pixels."""
        self.placeholder, self.normalization = placeholder, normalization
        self._bounds, self._side, self._resampling = bounds, side, resampling
        self.max_embeddings = _most_tokens(bounds, side)

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Returns one tile of the resized picture; numbers: frames, rows and columns of tokens. `options`: min_pixels,
        max_pixels, or size with both as shortest_edge and longest_edge. Raises InvalidArgument for other options and
        for pictures that are too elongated or get more than max_embeddings tokens."""
        for name in options:
            if name not in ("size", *EDGES.values()):
                text = f"{FIELD}.{name}: this model's processor has no such option; it has min_pixels, max_pixels, size"
                raise InvalidArgument(text, field=FIELD)
        side = self._side
        height, width = smart_resize(height, width, side, self._bounds.replaced(options, FIELD))
        rows, columns = height // side, width // side
        num_tokens = rows * columns
        if num_tokens > self.max_embeddings:
            most = self.max_embeddings
            text = f"{FIELD}: a picture has at most {most} tokens, and max_pixels gives {num_tokens}; lower it"
            raise InvalidArgument(text, field=FIELD)
        return TileLayout(1, height, width, (1, rows, columns))

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the scaled picture, [1, height, width, 3]."""
        from quire.shared.media.rendering import resized

        return resized(picture, layout.height, layout.width, self._resampling)[None]

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the placeholder, once for each square of merged patches."""
        count = math.prod(layout.numbers)
        return PlaceholderExpansion((self.placeholder,) * count, ((0, count),))


def smart_resize(height: int, width: int, side: int, bounds: AreaBounds) -> tuple[int, int]:
    """Returns the height and width, multiples of `side`, of a resized picture: rounded, and scaled where the area is
    out of bounds. Raises InvalidArgument for pictures that are too elongated."""
    aspect = max(height, width) / min(height, width)
    if aspect > MOST_ASPECT:
        raise InvalidArgument(
            f"absolute aspect ratio must be smaller than {MOST_ASPECT}, got {aspect:g}; crop the picture",
            field="messages",
        )
    rounded = round(height / side) * side, round(width / side) * side
    area = rounded[0] * rounded[1]
    if area > bounds.most:
        factor = math.sqrt((height * width) / bounds.most)
        return (
            max(side, math.floor(height / factor / side) * side),
            max(side, math.floor(width / factor / side) * side),
        )
    if area < bounds.least:
        factor = math.sqrt(bounds.least / (height * width))
        return math.ceil(height * factor / side) * side, math.ceil(width * factor / side) * side
    return rounded


def _most_tokens(bounds: AreaBounds, side: int) -> int:
    """Returns an upper bound of a picture's tokens: its area may exceed the bounds where a side is rounded up to one
    token."""
    most, least = (math.sqrt(area) / side for area in (bounds.most, bounds.least))
    of_sides = math.sqrt(MOST_ASPECT) + 1 / math.sqrt(MOST_ASPECT)  # sum of the sides of a rectangle of area 1
    rounded_up = least**2 + least * of_sides + 1
    return max(int(most**2), int(most * math.sqrt(MOST_ASPECT)), int(rounded_up), 1)


def make_qwen_vl(folder: Path, config: Mapping[str, Any]) -> QwenVLProcessor:
    """Returns the processor of a model. Raises InvalidArgument if its files do not fit together."""
    vision = config["vision_config"]
    values, name = read_values(folder)
    patch, merge = read_side(values, "patch_size", 14, name), read_side(values, "merge_size", 2, name)
    default = 16 if str(config["model_type"]).startswith("qwen3") else 14
    wanted = read_side(vision, "patch_size", default, CONFIG), read_side(vision, "spatial_merge_size", 2, CONFIG)
    if (patch, merge) != wanted:
        raise InvalidArgument(
            f"{name}: patch_size and merge_size are {patch} and {merge}, and vision_config has {wanted[0]} and "
            f"{wanted[1]}. They must be equal.",
            field="model",
        )
    placeholder = config.get("image_token_id", 151_655)
    if not isinstance(placeholder, int):
        raise InvalidArgument(f"config.json: image_token_id is {placeholder!r}, not a token id", field="model")
    bounds = AreaBounds(LEAST_PIXELS, MOST_PIXELS).replaced(values, name)
    return QwenVLProcessor(
        bounds,
        read_normalization(values, name),
        placeholder,
        side=patch * merge,
        resampling=read_resampling(values, name),
    )


def read_side(values: Mapping[str, Any], key: str, default: int, file: str) -> int:
    """Returns the side of a square that is given as one number, or as height and width. Raises InvalidArgument for
    anything but a positive number."""
    value = values.get(key, default)
    if isinstance(value, list) and value:
        value = value[0]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MOST_SIDE:
        raise InvalidArgument(f"{file}: {key} is {value!r}; a number from 1 to {MOST_SIDE} is needed", field="model")
    return value
