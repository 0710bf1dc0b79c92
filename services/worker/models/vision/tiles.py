"""Steps that encoders of tiled pictures share: encoding in batches of tiles, and joining neighbouring patches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.services.worker.models.vision.normalization import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor

    from quire.services.worker.models.vision.port import MediaInput
    from quire.shared.media.processor import Normalization

MAX_TILES = 64  # computed at once, so that the memory of activations is bounded


def encode_tiles(
    items: Sequence[MediaInput],
    encode: Callable[[Tensor], Tensor],
    normalization: Normalization,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Encodes the tiles of all items together, at most MAX_TILES at once.

    `encode`: normalized pixels [num_tiles, 3, height, width] in `dtype` -> [num_tiles, rows, width]. Returns the rows
    of each item, [its num_tiles, rows, width].
    """
    import torch

    batches = torch.cat([item.pixels for item in items]).split(MAX_TILES)
    rows = torch.cat([encode(normalize(batch, normalization, dtype)) for batch in batches])
    return list(rows.split([item.pixels.size(0) for item in items]))


def join_neighbours(x: Tensor, factor: int) -> Tensor:
    """Joins squares of factor x factor patches into one row each (pixel shuffle): [n, side * side, width] ->
    [n, (side / factor) ** 2, factor ** 2 * width], by rows."""
    side = round(x.size(1) ** 0.5)
    small = side // factor
    squares = x.view(x.size(0), small, factor, small, factor, x.size(2)).transpose(2, 3)
    return squares.reshape(x.size(0), small * small, -1)
