"""Pixels of media items: how the worker gets them, and what waits to be encoded."""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]  # [num_tiles, height, width, 3]


class PixelSource(Protocol):
    """Source of pixels: the media services of frontends, or a store in this process."""

    async def fetch(self, identifier: bytes, address: str) -> Pixels:
        """Returns the pixels of an item that the service at `address` keeps. Raises QuireError: NotFound for an unknown
        item, Unavailable if the service cannot be reached or sends something else."""

    async def close(self) -> None:
        """Closes connections."""


class FetchedItem(NamedTuple):
    """Item that is ready to be encoded."""

    identifier: bytes
    num_embeddings: int  # rows that are expected
    layout: tuple[int, ...]  # TileLayout.numbers of the family's processor
    pixels: Pixels
