"""Encodes media items on the device and keeps their rows for the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from quire.services.worker.media.item_shares import ItemShares
from quire.services.worker.replica.component import ReplicaComponent
from quire.services.worker.step.fetched_item import FetchedRows
from quire.shared.errors import (
    Internal,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
    Unimplemented,
)
from quire.shared.logs import logger

if TYPE_CHECKING:  # this module is also imported without torch
    import torch
    from torch import Tensor

    from quire.services.worker.media.encoder_cache import EncoderCache
    from quire.services.worker.models.vision.port import MediaEncoder
    from quire.services.worker.replica.retained_state import RetainedState
    from quire.services.worker.step.fetched_item import Fetched, FetchedItem, Pixels, Rows

log = logger("worker.media")

ALL_ITEMS = ItemShares()
MOST_ROW_LAYERS = 16  # embeddings in a row: those of the first layer, and of later ones (deepstack)


class EncodedBatch(NamedTuple):
    """Outcome of encoding some items; the device may still be computing."""

    errors: tuple[QuireError | None, ...]  # of each item; None: its rows are kept
    wait: Callable[[], None]  # blocks until the device has computed the rows; callable from any thread


class RowType(NamedTuple):
    """Type of the embeddings of a text model."""

    dtype: torch.dtype
    hidden_size: int

    @property
    def num_bytes(self) -> int:
        """Bytes of one embedding."""
        return self.hidden_size * self.dtype.itemsize


class NoMediaEncoding(ReplicaComponent):
    """Null object of models without an encoder."""

    capacity = num_rows = num_items = 0
    modalities: tuple[str, ...] = ()
    whole_items = False  # no step ends inside of an item's range
    layout = b""  # digest of what rows depend on; empty: rows are not exchanged with other workers

    def read(self, identifier: bytes) -> Rows:
        """Raises NotFound: no rows are kept."""
        raise NotFound(f"this worker does not keep the rows of the media item {identifier.hex()}", field="identifier")

    def encode(self, items: Sequence[Fetched]) -> EncodedBatch:
        """Fails every item: the worker has announced no encoder."""
        error = Unimplemented("this worker has no encoder for media")
        return EncodedBatch((error,) * len(items), _finished)

    def release(self, identifier: bytes) -> None:
        """Does nothing: no rows are kept."""

    def clear(self) -> None:
        """Does nothing: no rows are kept."""


class MediaEncoding(NoMediaEncoding):
    """Runs an encoder between steps; the rows stay in the cache until they are released or the epoch ends."""

    def __init__(
        self,
        encoder: MediaEncoder,
        cache: EncoderCache,
        device: torch.device,
        modalities: tuple[str, ...],
        *,
        row_type: RowType,
        scale: float = 1.0,
        whole_items: bool = False,
        layout: bytes = b"",
        shares: ItemShares = ALL_ITEMS,
    ) -> None:
        """Takes an encoder with weights and an empty cache. `scale`: factor of the rows; `whole_items`: the tokens of
        an item see each other, so that it is computed in one step; `layout`: digest of what rows depend on; `shares`:
        distributes items over ranks."""
        self._row_type, self.layout, self._shares = row_type, layout, shares
        self._copies = _side_stream(device)
        self._encoder, self._cache, self._device, self._scale = encoder, cache, device, scale
        self.capacity = cache.capacity
        self.modalities = modalities
        self.whole_items = whole_items

    @property
    def num_rows(self) -> int:  # type: ignore[override]
        """Number of rows that are kept."""
        return self._cache.num_rows

    @property
    def num_items(self) -> int:  # type: ignore[override]
        """Number of items whose rows are kept."""
        return len(self._cache)

    def read(self, identifier: bytes) -> Rows:
        """Returns the rows of a kept item in host memory, without waiting for what the device computes meanwhile.
        Raises NotFound."""
        import torch

        if identifier not in self._cache:
            return super().read(identifier)
        rows = self._cache.rows(identifier)
        with torch.cuda.stream(self._copies):
            found: Rows = rows.to("cpu").view(torch.uint8).numpy()
        return found

    def encode(self, items: Sequence[Fetched]) -> EncodedBatch:
        """Starts encoding items of equal shape together and keeps their rows, or keeps rows that other workers have
        computed. If that fails, each is encoded alone, so that an item fails by itself. Raises fatal device errors."""
        try:
            rows = self._rows(items)
        except Exception as error:
            _raise_if_fatal(error)
            if len(items) > 1:
                alone = [self.encode([item]) for item in items]
                return EncodedBatch(tuple(error for batch in alone for error in batch.errors), alone[-1].wait)
            return EncodedBatch((_failure(error, items[0]),), _finished)
        errors = tuple(self._keep(item, found) for item, found in zip(items, rows, strict=True))
        return EncodedBatch(errors, self._mark())

    def release(self, identifier: bytes) -> None:
        """Releases the rows of an item that no later step needs."""
        self._cache.release(identifier)

    def clear(self) -> None:
        """Releases all rows: the scheduler has forgotten them, or other weights would compute others."""
        self._cache.clear()

    def end_epoch(self, report: RetainedState) -> RetainedState:
        """Releases all rows; nothing is retained."""
        self._cache.clear()
        return report

    def _rows(self, items: Sequence[Fetched]) -> list[Tensor]:
        """Returns the rows of items of equal shape: computed and scaled here, or as another worker has sent them."""
        received = [self._received(item) for item in items if isinstance(item, FetchedRows)]
        pixels = [item for item in items if not isinstance(item, FetchedRows)]
        if not pixels:
            return received
        assert not received, "pixels and rows come in batches of their own"
        rows = self._shares.encode(pixels, self._compute, self._row_type.dtype, self._device)
        return rows if self._scale == 1 else [part * self._scale for part in rows]

    def _compute(self, items: Sequence[FetchedItem]) -> list[Tensor]:
        """Runs the encoder on items of equal shape."""
        from quire.services.worker.models.vision.port import MediaInput

        return self._encoder.encode([MediaInput(self._upload(item.pixels), item.layout) for item in items])

    def _received(self, item: FetchedRows) -> Tensor:
        """Returns the rows of another worker on the device. Raises Unavailable for rows of another width than
        embeddings have, or a multiple of it."""
        width, num_bytes = self._row_type.num_bytes, item.rows.shape[1]
        if num_bytes % width or not 0 < num_bytes <= MOST_ROW_LAYERS * width:
            text = f"rows of {num_bytes} bytes, where embeddings have {width}"
            raise Unavailable(f"media: another worker sent {text}")
        return self._upload(item.rows).view(self._row_type.dtype)

    def _upload(self, pixels: Pixels | Rows) -> Tensor:
        """Returns pixels or rows on the device. They are copied from pinned memory: a copy from other memory would wait
        for what the device computes. Read-only ones, which a store or a message owns, are copied on the CPU too."""
        import numpy as np
        import torch

        if self._device.type == "cuda":
            dtype = torch.float32 if pixels.dtype == np.float32 else torch.uint8
            pinned = torch.empty(pixels.shape, dtype=dtype, pin_memory=True)
            pinned.numpy()[...] = pixels
            return pinned.to(self._device, non_blocking=True)
        own = pixels if pixels.flags.writeable else pixels.copy()
        return torch.from_numpy(own).to(self._device)

    def _keep(self, item: Fetched, rows: Tensor) -> QuireError | None:
        """Keeps the rows of an item; returns the error of an item with another number of rows than the scheduler
        counts, or for which there is no room."""
        if rows.size(0) != item.num_embeddings:
            text = f"the encoder computes {rows.size(0)} rows from {_text(item)}"
            return InvalidArgument(f"media: {text}, not num_embeddings {item.num_embeddings}", field="media")
        try:
            self._cache.keep(item.identifier, _own_memory(rows))
        except ResourceExhausted as error:
            return error
        return None

    def _mark(self) -> Callable[[], None]:
        """Marks the device's stream; returns a function that waits for the mark."""
        if self._device.type != "cuda":
            return _finished
        import torch

        event = torch.cuda.Event(blocking=True)
        event.record()
        return event.synchronize


def _raise_if_fatal(error: Exception) -> None:
    from quire.services.worker.device.device import is_fatal_device_error

    if is_fatal_device_error(error):
        raise error


def _text(item: Fetched) -> str:
    """Describes the content of an item for messages."""
    if isinstance(item, FetchedRows):
        return f"rows {list(item.rows.shape)}"
    return f"pixels {list(item.pixels.shape)}"


def _failure(error: Exception, item: Fetched) -> QuireError:
    """Returns the error to report for an item that cannot be encoded."""
    import torch

    if isinstance(error, QuireError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return ResourceExhausted(f"media: no memory to encode {_text(item)}")
    log.error("encoding failed", item=_text(item), error=f"{type(error).__name__}: {error}")
    return Internal(f"media: {_text(item)} cannot be encoded: {type(error).__name__}")


def _own_memory(rows: Tensor) -> Tensor:
    """Returns rows that keep no other item's memory alive: those of one call may be parts of one tensor."""
    rows = rows.contiguous()
    return rows.clone() if rows.untyped_storage().nbytes() > rows.nbytes else rows


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Returns a stream for copies that do not wait for the device's other work; None on the CPU."""
    import torch

    return torch.cuda.Stream(device) if device.type == "cuda" else None


def _finished() -> None:
    """Returns at once: there is nothing to wait for."""
