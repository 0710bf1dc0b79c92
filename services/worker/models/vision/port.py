"""Interface between the worker's runner and the encoder of a model's media items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from quire.services.worker.layers.placement import Alternative, Destination


class MediaInput(NamedTuple):
    """Pixels of one item, or features of its sound, as the frontend rendered them."""

    # On the device: uint8 [num_tiles, height, width, 3], not normalized; of sound: float32 [num_tiles, bins, frames]
    pixels: Tensor
    layout: tuple[int, ...] = ()  # TileLayout.numbers of the family's processor


class MediaEncoder(Protocol):
    """Tower of pictures or of sound, and projector, of one model, placed like its layers."""

    @property
    def passed_over(self) -> tuple[str, ...]:
        """Prefixes of tensors in checkpoints that are not used."""

    @property
    def alternatives(self) -> Mapping[str, Alternative]:
        """Alternative names and shapes of tensors."""

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        """Yields the tensors to load, by name."""

    def finish(self) -> None:
        """Prepares loaded weights."""

    def encode(self, items: Sequence[MediaInput]) -> list[Tensor]:
        """Computes the rows of each item, [num_embeddings, row width], in the text model's dtype. Items of equal
        shape are computed together. The row width is the text model's hidden size, or a multiple of it where rows are
        added after later layers too (deepstack)."""
