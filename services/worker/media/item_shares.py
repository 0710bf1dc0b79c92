"""Encoding of media on tensor-parallel ranks: each rank encodes a share of a call's items and gets the rows of the
others, so that the encoder, which every rank has as a whole, runs on all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.services.worker.layers.sharding import WHOLE, Shard
from quire.shared.errors import Internal

if TYPE_CHECKING:  # this module is also imported without torch
    import torch
    from torch import Tensor

    from quire.services.worker.step.fetched_item import FetchedItem

NO_ROWS = 1 << 40  # width of a rank that has nothing to encode
FAILED = 0

Encode = Callable[[Sequence["FetchedItem"]], list["Tensor"]]


class ItemShares:
    """Distributes the items of a call over the ranks, in turn. All ranks make the same calls in the same order."""

    def __init__(self, shard: Shard = WHOLE) -> None:
        self._shard = shard

    def encode(
        self, items: Sequence[FetchedItem], encode: Encode, dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Returns the rows of the items, of which `encode` computes this rank's share; a single item is computed by
        every rank. Raises an error on all ranks if one of them fails, so that they continue alike."""
        rank, size = self._shard.rank, self._shard.size
        if size == 1 or len(items) == 1:
            return encode(items)
        shares = [items[first::size] for first in range(size)]
        rows, error = _attempt(shares[rank], encode)
        collectives = self._shard.collectives
        width = collectives.min_over_ranks(FAILED if error else rows[0].size(1) if rows else NO_ROWS)
        if width == FAILED:
            raise error or Internal("media: another rank could not encode its share of the items")
        import torch

        most = max(sum(item.num_embeddings for item in share) for share in shares)
        own = torch.zeros((most, width), dtype=dtype, device=device)
        if rows:
            joined = torch.cat(rows)
            own[: joined.size(0)] = joined
        gathered = collectives.all_gather(own)  # [size, most, width]
        parts = [
            gathered[first].split([*(item.num_embeddings for item in share), _spare(share, most)])
            for first, share in enumerate(shares)
        ]
        return [parts[index % size][index // size] for index in range(len(items))]


def _attempt(share: Sequence[FetchedItem], encode: Encode) -> tuple[list[Tensor], Exception | None]:
    """Returns the rows of a share, or the error that prevents them: other ranks must learn of it before it is raised.
    A fatal device error is raised, as it ends all ranks."""
    from quire.services.worker.device.device import is_fatal_device_error

    try:
        rows = encode(share) if share else []
    except Exception as error:
        if is_fatal_device_error(error):
            raise
        return [], error
    if any(part.size(0) != item.num_embeddings for item, part in zip(share, rows, strict=True)):
        return [], Internal("media: an item has another number of rows than the scheduler counts")
    return rows, None


def _spare(share: Sequence[FetchedItem], most: int) -> int:
    """Returns the rows that a share has less than the largest one."""
    return most - sum(item.num_embeddings for item in share)
