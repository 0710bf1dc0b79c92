"""Sources of pixels, and of rows that other workers have computed."""

from __future__ import annotations

from typing import Protocol

from quire.services.worker.step.fetched_item import Pixels, Rows
from quire.shared.errors import FailedPrecondition
from quire.shared.pb.worker.v1 import worker_pb2


class PixelSource(Protocol):
    """Source of the pixels of media items: the media services of frontends, or a store in this process."""

    async def fetch(self, identifier: bytes, address: str) -> Pixels:
        """Returns the pixels of an item that the service at `address` keeps. Raises QuireError: NotFound for an unknown
        item, Unavailable if the service cannot be reached or sends something else."""

    async def close(self) -> None:
        """Closes the connections to media services; nothing can be fetched afterwards."""


class RowSource(Protocol):
    """Source of the rows of media items that other workers have encoded."""

    async def fetch(self, identifier: bytes, num_rows: int, source: worker_pb2.RowsSource) -> Rows:
        """Returns the rows of an item, uint8 [num_rows, bytes of a row]. Raises QuireError: Unavailable if the worker
        cannot be reached or sends something else."""

    async def close(self) -> None:
        """Closes the connections to other workers; nothing can be fetched afterwards."""


class NoRows:
    """Null object of workers that exchange no rows."""

    async def fetch(self, identifier: bytes, num_rows: int, source: worker_pb2.RowsSource) -> Rows:
        """Refuses the fetch: raises FailedPrecondition, as rows could not be compared with this worker's own."""
        raise FailedPrecondition("this worker has announced no layout of rows")

    async def close(self) -> None:
        """Does nothing: there are no connections."""


NO_ROWS = NoRows()
