"""Interface of the processing of media items by model family: layout, rendering and expansion at the frontend, and
normalization at the worker.

A frontend decodes a picture, asks the family for its layout, renders the 8-bit tiles that the encoder gets, and puts
the expansion in the place of the placeholder token. A worker normalizes the tiles and encodes them.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    import numpy as np
    import numpy.typing as npt
    from PIL import Image

CHANNELS = 3  # of a pixel


class Normalization(NamedTuple):
    """Normalization of 8-bit pixels, per colour channel: (pixel * factor - mean) / std."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    factor: float = 1 / 255


class TileLayout(NamedTuple):
    """Cut of one item: tiles of equal size that the encoder gets, in order."""

    num_tiles: int  # of a picture; frames of a video; pieces of sound
    height: int  # of each tile, in pixels
    width: int
    numbers: tuple[int, ...] = ()  # MediaItem.layout: defined by the family, the same for frontend and worker
    # float32 features in the place of pixels: `height` frequency bins by `width` frames, or token ids in a row
    is_sound: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of all tiles."""
        tiles = (self.num_tiles, self.height, self.width)
        return tiles if self.is_sound else (*tiles, CHANNELS)

    @property
    def dtype(self) -> str:
        """Type of the array's elements, in numpy's notation."""
        return "<f4" if self.is_sound else "u1"

    @property
    def num_bytes(self) -> int:
        """Size of the array."""
        return math.prod(self.shape) * (4 if self.is_sound else 1)


class PlaceholderExpansion(NamedTuple):
    """Tokens that take the place of an item's placeholder."""

    token_ids: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]  # (start, length): positions in token_ids that take the encoder's rows, in order

    @property
    def num_embeddings(self) -> int:
        """Number of rows that the encoder computes."""
        return sum(length for _, length in self.runs)


class PromptTokenizer(Protocol):
    """Tokenizer, as far as expansions need it."""

    def encode(self, text: str) -> list[int]:
        """Returns the token ids of `text`, special tokens in it recognized, none added."""


class MediaProcessor(Protocol):
    """Processing of one model's pictures. Made from config.json and the processor files by a function in
    registry.PROCESSORS."""

    @property
    def placeholder(self) -> int:
        """Token that the chat template writes once for each picture."""

    @property
    def normalization(self) -> Normalization:
        """Normalization, by the worker, of the rendered pixels."""

    @property
    def max_embeddings(self) -> int:
        """Largest number of rows of one item."""

    def layout(self, height: int, width: int, options: Mapping[str, Any]) -> TileLayout:
        """Plans for a picture of `height` x `width` pixels. `options`: the request's mm_processor_kwargs. Raises
        InvalidArgument for a picture or an option that the family cannot process."""

    def render(self, picture: Image.Image, layout: TileLayout) -> npt.NDArray[np.uint8]:
        """Returns the tiles of an RGB picture, [num_tiles, height, width, 3]."""

    def expand(self, layout: TileLayout, tokenizer: PromptTokenizer) -> PlaceholderExpansion:
        """Returns the tokens that replace the placeholder of an item with this layout. Raises InvalidArgument if the
        tokenizer lacks one of the family's special tokens."""


@runtime_checkable
class WholeItemProcessor(Protocol):
    """Extension of the processors of models that compute all tokens of an item in one step, because these see each
    other."""

    @property
    def max_item_tokens(self) -> int:
        """Largest number of tokens of one item, text in it included."""


@runtime_checkable
class WholePromptProcessor(Protocol):
    """Extension of the processors of models in which all tokens of a prompt with a picture see each other: its one
    item is the whole prompt."""

    covers_prompt: bool


def no_options(options: Mapping[str, Any]) -> None:
    """Raises InvalidArgument for the first option of a family that has none."""
    for name in options:
        raise InvalidArgument(
            f"mm_processor_kwargs.{name}: this model's processor has no such option; it has none, leave it out",
            field="mm_processor_kwargs",
        )
