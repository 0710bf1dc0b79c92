"""Cache of encoder outputs: the rows of media items that the scheduler has ordered and not released."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.shared.errors import ResourceExhausted

if TYPE_CHECKING:
    from torch import Tensor


class EncoderCache:
    """Owns the rows of media items on the device, by identifier. The scheduler decides what is kept."""

    def __init__(self, capacity: int) -> None:
        """Creates an empty cache. `capacity`: number of rows over all items."""
        self.capacity = capacity
        self.num_rows = 0
        self._rows: dict[bytes, Tensor] = {}

    def __contains__(self, identifier: bytes) -> bool:
        return identifier in self._rows

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self, identifier: bytes) -> Tensor:
        """Returns the rows of a kept item, [num_embeddings, row width]."""
        return self._rows[identifier]

    def check_room(self, num_rows: int) -> None:
        """Raises ResourceExhausted if `num_rows` more do not fit."""
        if self.num_rows + num_rows > self.capacity:
            raise ResourceExhausted(
                f"encoder_cache_size: {self.num_rows} of {self.capacity} rows are in use, and an item has {num_rows}; "
                "the scheduler has to release others first, or set a larger --encoder-cache-size"
            )

    def keep(self, identifier: bytes, rows: Tensor) -> None:
        """Keeps the rows of an item, in place of those kept before. Raises as check_room()."""
        self.release(identifier)
        self.check_room(rows.size(0))
        self._rows[identifier] = rows
        self.num_rows += rows.size(0)

    def release(self, identifier: bytes) -> None:
        """Releases the rows of an item; does nothing for items that are not kept."""
        rows = self._rows.pop(identifier, None)
        if rows is not None:
            self.num_rows -= rows.size(0)

    def clear(self) -> None:
        """Releases all rows."""
        self._rows.clear()
        self.num_rows = 0
