"""A media item whose pixels, or features of sound, have arrived."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# uint8 [num_tiles, height, width, 3]; of sound: float32 [num_tiles, bins, frames]
Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]


class FetchedItem(NamedTuple):
    """Item that is ready to be encoded."""

    identifier: bytes
    num_embeddings: int  # rows that are expected
    layout: tuple[int, ...]  # TileLayout.numbers of the family's processor
    pixels: Pixels
