"""Sources of pixels."""

from __future__ import annotations

from typing import Protocol

from quire.services.worker.step.fetched_item import Pixels


class PixelSource(Protocol):
    """Source of the pixels of media items: the media services of frontends, or a store in this process."""

    async def fetch(self, identifier: bytes, address: str) -> Pixels:
        """Returns the pixels of an item that the service at `address` keeps. Raises QuireError: NotFound for an unknown
        item, Unavailable if the service cannot be reached or sends something else."""

    async def close(self) -> None:
        """Closes the connections to media services; nothing can be fetched afterwards."""
