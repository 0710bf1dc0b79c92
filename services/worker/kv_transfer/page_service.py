"""KVTransferService: serves this worker's pages to other workers that its scheduler has sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio
from torch import Tensor

from quire.services.worker.kv_transfer.checksums import checksums
from quire.services.worker.kv_transfer.grpc_transport import SERVICE_NAME
from quire.services.worker.kv_transfer.peer_pages import PeerPages, SharedPages
from quire.shared import columns
from quire.shared.columns import U32, ColumnError
from quire.shared.errors import (
    FailedPrecondition,
    InvalidArgument,
    QuireError,
    Unavailable,
    transport,
)
from quire.shared.kv import block_hash
from quire.shared.logs import logger
from quire.shared.metrics.worker import WorkerMetrics
from quire.shared.pb.worker.v1 import kv_transfer_pb2 as pb
from quire.shared.pb.worker.v1 import kv_transfer_pb2_grpc
from quire.shared.process.supervision import Tasks
from quire.shared.rpc.parts import MAX_PART_BYTES
from quire.shared.rpc.timed_messages import read_message, write_message
from quire.shared.rpc.trust import HandshakeAcceptor

log = logger("worker.kv_transfer")

MAX_SERVED = 4  # callers at a time; further ones are queued
REQUEST_TIMEOUT_S = 5.0  # from the start of a call to its request
TAKEN_TIMEOUT_S = 30.0  # for a caller to copy pages or receive a part; it may run a step first

Context = grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse]


class PageReader(Protocol):
    """Reads a worker's pages concurrently with its steps."""

    async def read_pages(self, epoch: int, after_step: int, blocks: U32) -> Tensor:
        """Returns pages in host memory, uint8 [num_blocks, bytes of a page]. Raises FailedPrecondition if the worker is
        not in that epoch or leaves it meanwhile."""

    @property
    def page_layout(self) -> bytes:
        """Current layout digest of the pages."""

    @property
    def blocks_per_piece(self) -> int: ...

    @property
    def peers(self) -> PeerPages | None:
        """Access by other processes of this host; None if they cannot reach the pages."""

    async def wait_for_pages(self, epoch: int, after_step: int, blocks: U32) -> None:
        """Returns once step `after_step` has filled the blocks. Raises as read_pages does."""

    def check_epoch(self, epoch: int) -> None:
        """Raises FailedPrecondition if the worker has left that epoch."""


@dataclass(frozen=True, slots=True)
class ServingBounds:
    """Limits of concurrent callers and their time."""

    max_served: int = MAX_SERVED
    request_timeout_s: float = REQUEST_TIMEOUT_S
    taken_timeout_s: float = TAKEN_TIMEOUT_S


BOUNDS = ServingBounds()


class PageService(kv_transfer_pb2_grpc.KVTransferServiceServicer):
    """Serves pages with a bounded number of pages in memory and in transit."""

    def __init__(self, door: HandshakeAcceptor, metrics: WorkerMetrics, bounds: ServingBounds = BOUNDS) -> None:
        self.bounds = bounds
        self._door, self._metrics = door, metrics
        self._reader: PageReader | None = None
        self._num_blocks = 0
        self._semaphore = asyncio.Semaphore(bounds.max_served)

    def serve(self, reader: PageReader, num_blocks: int) -> None:
        """Starts serving the pages of `reader`, once the worker is built; until then calls are answered with
        UNAVAILABLE."""
        self._reader, self._num_blocks = reader, num_blocks

    async def Fetch(self, _requests: object, context: Context) -> None:
        """Serves one caller: authenticates it, validates its request and sends the pages, or only their location to a
        caller on the same host that can open them. A QuireError aborts the call with its gRPC code."""
        try:
            await self._door.authenticate(context, pb.FetchResponse, SERVICE_NAME)
            message = await read_message(context, self.bounds.request_timeout_s, "no request was received")
            reader = self._reader
            if reader is None:
                raise Unavailable("this worker does not serve pages")
            request = self._validated(message, reader.page_layout)
            if reader.peers is not None and request.host == reader.peers.host:
                await self._share(context, reader, request, reader.peers.own)
            else:
                await self._serve(context, reader, request)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    def _validated(self, message: Any, layout: bytes) -> pb.PageRequest:
        """Returns the request for pages in a call's first message. Raises InvalidArgument for invalid block ids or
        hashes, FailedPrecondition for another message and for a layout that differs from `layout`."""
        kind = None if message is grpc.aio.EOF else message.WhichOneof("message")
        if kind != "pages":
            raise self._door.unexpected_handshake(kind) or FailedPrecondition(
                "the first message of a call must be pages"
            )
        request: pb.PageRequest = message.pages
        try:
            blocks = columns.u32(request.block_ids)
        except ColumnError as error:
            raise InvalidArgument(f"block_ids: {error}", field="block_ids") from None
        if (
            not 0 < len(blocks) <= self._num_blocks
            or not 1 <= int(blocks.min()) <= int(blocks.max()) < self._num_blocks
        ):
            text = f"block_ids: {len(blocks)} ids, of which some are outside 1..{self._num_blocks - 1}"
            raise InvalidArgument(text, field="block_ids")
        if len(request.block_hashes) != len(blocks) * block_hash.HASH_BYTES:
            text = f"block_hashes: {len(request.block_hashes)} bytes for {len(blocks)} blocks"
            raise InvalidArgument(text, field="block_hashes")
        if request.layout != layout:
            raise FailedPrecondition("layout: the caller's blocks differ from this worker's", field="layout")
        return request

    async def _share(self, context: Context, reader: PageReader, request: pb.PageRequest, own: SharedPages) -> None:
        """Sends the pages' location once they are filled and waits for the caller's confirmation; the copy is valid if
        the epoch lasted that long, else FailedPrecondition is raised. Counts the bytes as sent."""
        async with self._semaphore:
            await reader.wait_for_pages(request.epoch, request.after_step, columns.u32(request.block_ids))
            await context.write(pb.FetchResponse(shared=own.to_proto()))
            message = await read_message(
                context, self.bounds.taken_timeout_s, "no confirmation that the shared pages were taken"
            )
            if message is grpc.aio.EOF or message.WhichOneof("message") != "taken":
                raise FailedPrecondition("expected a confirmation that the shared pages were taken")
            reader.check_epoch(request.epoch)
        self._metrics.kv_sent.inc(len(request.block_ids) // 4 * own.num_parts * own.part_bytes)

    async def _serve(self, context: Context, reader: PageReader, request: pb.PageRequest) -> None:
        """Sends the requested pages over gRPC, one piece at a time, when fewer than `max_served` callers are served."""
        async with self._semaphore, aclosing(_pieces(reader, request)) as pieces:
            async for page_checksums, pages in pieces:
                await self._send(context, page_checksums, pages)

    async def _send(self, context: Context, page_checksums: U32, pages: Tensor) -> None:
        """Sends pages in parts; a page's checksum travels with the part in which the page ends."""
        data, page_bytes = pages.numpy().reshape(-1), pages.size(1)
        num_sent = 0
        for start in range(0, len(data), MAX_PART_BYTES):
            end = min(start + MAX_PART_BYTES, len(data))
            ended = end // page_bytes
            part = pb.PagePart(data=data[start:end].tobytes(), checksums=page_checksums[num_sent:ended].tobytes())
            num_sent = ended
            # a caller that does not read would block others
            await write_message(
                context, pb.FetchResponse(part=part), self.bounds.taken_timeout_s, "pages were not taken"
            )
        self._metrics.kv_sent.inc(len(data))


async def _pieces(reader: PageReader, request: pb.PageRequest) -> AsyncGenerator[tuple[U32, Tensor], None]:
    """Yields pieces of at most `blocks_per_piece` pages with their checksums; the next piece is read while one is sent.
    Raises FailedPrecondition as PageReader.read_pages()."""
    blocks, hashes = columns.u32(request.block_ids), block_hash.split(request.block_hashes)
    most = reader.blocks_per_piece
    starts = range(0, len(blocks), most)
    tasks = Tasks()
    reading = tasks.start("pages", _read(reader, request, blocks[:most], hashes[:most]))
    try:
        for start in starts:
            piece = await reading
            after = slice(start + most, start + 2 * most)
            if len(blocks[after]):
                reading = tasks.start("pages", _read(reader, request, blocks[after], hashes[after]))
            yield piece
    finally:
        await tasks.close()


async def _read(reader: PageReader, request: pb.PageRequest, blocks: U32, hashes: list[bytes]) -> tuple[U32, Tensor]:
    """Reads pages, then computes their checksums on another thread."""
    pages = await reader.read_pages(request.epoch, request.after_step, blocks)
    return await asyncio.to_thread(checksums, request.layout, hashes, pages.numpy()), pages
