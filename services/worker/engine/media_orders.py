"""Orders to prepare media items: pixels are fetched on the event loop, then the device thread encodes them; or their
rows are fetched from a worker that has encoded them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from quire.services.worker.codec.media_codec import decode_item
from quire.services.worker.engine.commands import ResultReceiver
from quire.services.worker.media.pixels import NO_ROWS, PixelSource, RowSource
from quire.services.worker.media.waiting import FetchedOrder, WaitingMedia
from quire.services.worker.step.fetched_item import Fetched, FetchedItem, FetchedRows
from quire.services.worker.step.media_items import MediaItem
from quire.shared.columns import ColumnError
from quire.shared.errors import Internal, InvalidArgument, QuireError, to_proto
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.process.supervision import Tasks

log = logger("worker.media")

MAX_CONCURRENT_ITEMS = 16  # that are fetched or wait for the encoder: bounds the memory of their pixels


class MediaObserver(Protocol):
    """Callback for every media item."""

    def media_prepared(self, fetch_us: int, encode_us: int, *, outcome: str) -> None:
        """`outcome`: "encoded", "received" (its rows, from another worker) or "failed"."""


class MediaOrders:
    """Executes the orders of attachments; each is answered once, unless its attachment has ended."""

    def __init__(
        self,
        source: PixelSource,
        encode: Callable[[WaitingMedia], None],
        observer: MediaObserver,
        most_items: int = 0,
        *,
        rows: RowSource = NO_ROWS,
    ) -> None:
        """Takes a source of pixels. `encode`: queues a command for the device thread; `most_items`: of one call of the
        encoder; 0: by their pixels; `rows`: source of what other workers have encoded."""
        self._source, self._rows, self._encode, self._observer = source, rows, encode, observer
        self._waiting = WaitingMedia(most_items)
        self._tasks = Tasks()
        self._places = asyncio.Semaphore(MAX_CONCURRENT_ITEMS)
        self._receiver: ResultReceiver | None = None
        self._num_releases = 0

    def start_epoch(self, receiver: ResultReceiver) -> None:
        """Begins an attachment, whose results go to `receiver`; abandons the orders of the previous one."""
        self._receiver = receiver
        for task in self._tasks.running:
            task.cancel()

    def prepare(self, receiver: ResultReceiver, order: pb.PrepareMedia) -> None:
        """Starts fetching and encoding an item, while steps run; `receiver` gets the outcome."""
        self._tasks.start("the preparation of media", self._prepare(receiver, order, self._num_releases))

    def count_release(self) -> None:
        """Counts an order to release rows: items that are ordered afterwards are encoded after it."""
        self._num_releases += 1

    async def close(self) -> None:
        """Abandons all orders and closes the sources."""
        await self._tasks.close()
        await self._source.close()
        await self._rows.close()

    async def _prepare(self, receiver: ResultReceiver, order: pb.PrepareMedia, num_releases: int) -> None:
        """Prepares an item, after `num_releases` releases, and reports it; raises no error."""
        prepared = pb.MediaPrepared(identifier=order.item.identifier)
        try:
            async with self._places:
                item = _decode(order)
                await self._fetch_and_encode(receiver, item, order, prepared, num_releases)
        except QuireError as error:
            prepared.error.CopyFrom(to_proto(error))
        except Exception as error:
            log.exception("the preparation of media failed")
            prepared.error.CopyFrom(to_proto(Internal(f"{type(error).__name__}: {error}")))
        failed = prepared.HasField("error")
        if failed:
            log.warning("a media item cannot be prepared", address=order.address, reason=prepared.error.message)
        outcome = "failed" if failed else "received" if order.HasField("rows") else "encoded"
        self._observer.media_prepared(prepared.fetch_us, prepared.encode_us, outcome=outcome)
        if receiver is self._receiver:
            receiver.media_prepared(prepared)

    async def _fetch_and_encode(
        self,
        receiver: ResultReceiver,
        item: MediaItem,
        order: pb.PrepareMedia,
        prepared: pb.MediaPrepared,
        num_releases: int,
    ) -> None:
        """Fetches an item and waits until its rows are kept; writes the times into `prepared`. Raises QuireError."""
        begun_ns = time.perf_counter_ns()
        fetched = await self._fetch(item, order)
        fetched_ns = time.perf_counter_ns()
        prepared.fetch_us = (fetched_ns - begun_ns) // 1000
        done: asyncio.Future[QuireError | None] = asyncio.get_running_loop().create_future()

        def finish(error: QuireError | None) -> None:
            if not done.done():
                done.set_result(error)

        if self._waiting.put(FetchedOrder(receiver, fetched, finish, num_releases)):
            self._encode(self._waiting)
        error = await done
        prepared.encode_us = (time.perf_counter_ns() - fetched_ns) // 1000
        if error is not None:
            raise error

    async def _fetch(self, item: MediaItem, order: pb.PrepareMedia) -> Fetched:
        """Fetches the rows of an item from the worker that the order names, or its pixels. Raises QuireError."""
        if order.HasField("rows"):
            rows = await self._rows.fetch(item.identifier, item.num_embeddings, order.rows)
            return FetchedRows(item.identifier, item.num_embeddings, rows)
        pixels = await self._source.fetch(item.identifier, order.address)
        return FetchedItem(item.identifier, item.num_embeddings, item.layout, pixels)


def _decode(order: pb.PrepareMedia) -> MediaItem:
    """Decodes the ordered item. Raises InvalidArgument."""
    try:
        return decode_item(order.item)
    except ColumnError as error:
        raise InvalidArgument(f"item: {error}", field="item") from None
