"""A media item whose pixels have arrived."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]  # [num_tiles, height, width, 3]


class FetchedItem(NamedTuple):
    """Item that is ready to be encoded."""

    identifier: bytes
    num_embeddings: int  # rows that are expected
    layout: tuple[int, ...]  # TileLayout.numbers of the family's processor
    pixels: Pixels
