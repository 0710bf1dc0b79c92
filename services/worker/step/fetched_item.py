"""A media item whose pixels, features of sound, or rows have arrived."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

# uint8 [num_tiles, height, width, 3]; of sound: float32 [num_tiles, bins, frames]
Pixels = npt.NDArray[np.uint8] | npt.NDArray[np.float32]
Rows = npt.NDArray[np.uint8]  # [num_embeddings, bytes of a row]


class FetchedItem(NamedTuple):
    """Item that is ready to be encoded."""

    identifier: bytes
    num_embeddings: int  # rows that are expected
    layout: tuple[int, ...]  # TileLayout.numbers of the family's processor
    pixels: Pixels


class FetchedRows(NamedTuple):
    """Item that another worker has encoded."""

    identifier: bytes
    num_embeddings: int  # rows that are expected
    rows: Rows


Fetched = FetchedItem | FetchedRows
