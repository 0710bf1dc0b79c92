"""Pixels that the frontend's half of the engine hands to the worker's half."""

from __future__ import annotations

import numpy as np

from quire.services.frontend.media.store import MediaStore
from quire.services.worker.step.fetched_item import Pixels
from quire.shared.errors import NotFound


class StorePixels:
    """PixelSource over the media store of the same process; addresses have no meaning."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store

    async def fetch(self, identifier: bytes, address: str) -> Pixels:
        """Returns the pixels of an item without a copy. Raises NotFound for an item that no request holds any more."""
        tiles = self._store.find(identifier)
        if tiles is None:
            raise NotFound(f"the media item {identifier.hex()} is not kept any more")
        return np.frombuffer(tiles.pixels, tiles.layout.dtype).reshape(tiles.layout.shape)

    async def close(self) -> None:
        """Does nothing: there are no connections."""
