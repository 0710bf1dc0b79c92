"""quire.worker.v1.KVTransferService: pages of this worker, for others that were sent by its scheduler."""

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
    DeadlineExceeded,
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
from quire.shared.rpc.trust import HandshakeAcceptor

log = logger("worker.kv_transfer")

MAX_SERVED = 4  # at a time; others wait for their turn
REQUEST_TIMEOUT_S = 5.0  # from the opening of a call to its request
TAKEN_TIMEOUT_S = 30.0  # that a caller may take to copy pages, or the next part: a step of its own may come first

Context = grpc.aio.ServicerContext[pb.FetchRequest, pb.FetchResponse]


class PageReader(Protocol):
    """Reads a worker's pages beside its steps."""

    async def read_pages(self, epoch: int, after_step: int, blocks: U32) -> Tensor:
        """uint8 [num_blocks, bytes of a page], in host memory. Raises FailedPrecondition if the worker is not in that
        epoch, or leaves it meanwhile."""

    @property
    def page_layout(self) -> bytes:
        """What the bytes mean now."""

    @property
    def blocks_per_piece(self) -> int: ...

    @property
    def peers(self) -> PeerPages | None:
        """None: other processes of this host cannot reach its pages."""

    async def wait_for_pages(self, epoch: int, after_step: int, blocks: U32) -> None:
        """Returns once the blocks hold what they are to hold. Raises as read_pages does."""

    def check_epoch(self, epoch: int) -> None:
        """Raises FailedPrecondition if the worker is not in that epoch any more."""


@dataclass(frozen=True, slots=True)
class ServingBounds:
    """How many callers are served at a time, and how long they may take."""

    max_served: int = MAX_SERVED
    request_timeout_s: float = REQUEST_TIMEOUT_S
    taken_timeout_s: float = TAKEN_TIMEOUT_S


BOUNDS = ServingBounds()


class PageService(kv_transfer_pb2_grpc.KVTransferServiceServicer):
    """A bounded number of pages is in memory, and on their way, at a time."""

    def __init__(self, door: HandshakeAcceptor, metrics: WorkerMetrics, bounds: ServingBounds = BOUNDS) -> None:
        self.bounds = bounds
        self._door, self._metrics = door, metrics
        self._reader: PageReader | None = None
        self._num_blocks = 0
        self._semaphore = asyncio.Semaphore(bounds.max_served)

    def serve(self, reader: PageReader, num_blocks: int) -> None:
        """The worker is built."""
        self._reader, self._num_blocks = reader, num_blocks

    async def Fetch(self, _requests: object, context: Context) -> None:
        try:
            await self._door.authenticate(context, pb.FetchResponse, SERVICE_NAME)
            message = await _read_message(context, self.bounds.request_timeout_s, "no request came")
            reader = self._reader
            if reader is None:
                raise Unavailable("this worker has no pages for others")
            request = self._validated(message, reader.page_layout)
            if reader.peers is not None and request.host == reader.peers.host:
                await self._share(context, reader, request, reader.peers.own)
            else:
                await self._serve(context, reader, request)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    def _validated(self, message: Any, layout: bytes) -> pb.PageRequest:
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
            text = f"block_ids: {len(blocks)} ids, where 1 to {self._num_blocks - 1} are blocks"
            raise InvalidArgument(text, field="block_ids")
        if len(request.block_hashes) != len(blocks) * block_hash.HASH_BYTES:
            text = f"block_hashes: {len(request.block_hashes)} bytes for {len(blocks)} blocks"
            raise InvalidArgument(text, field="block_hashes")
        if request.layout != layout:
            raise FailedPrecondition("layout: the caller's blocks are not like this worker's", field="layout")
        return request

    async def _share(self, context: Context, reader: PageReader, request: pb.PageRequest, own: SharedPages) -> None:
        """The caller copies; what it has is right if the epoch has lasted so long."""
        async with self._semaphore:
            await reader.wait_for_pages(request.epoch, request.after_step, columns.u32(request.block_ids))
            await context.write(pb.FetchResponse(shared=own.to_proto()))
            message = await _read_message(
                context, self.bounds.taken_timeout_s, "no word came that the shared pages were taken"
            )
            if message is grpc.aio.EOF or message.WhichOneof("message") != "taken":
                raise FailedPrecondition("after shared pages comes word that they were taken")
            reader.check_epoch(request.epoch)
        self._metrics.kv_sent.inc(len(request.block_ids) // 4 * own.num_parts * own.part_bytes)

    async def _serve(self, context: Context, reader: PageReader, request: pb.PageRequest) -> None:
        async with self._semaphore, aclosing(_pieces(reader, request)) as pieces:
            async for page_checksums, pages in pieces:
                await self._send(context, page_checksums, pages)

    async def _send(self, context: Context, page_checksums: U32, pages: Tensor) -> None:
        """Checksums come with the part in which their page ends."""
        data, page_bytes = pages.numpy().reshape(-1), pages.size(1)
        num_sent = 0
        for start in range(0, len(data), MAX_PART_BYTES):
            end = min(start + MAX_PART_BYTES, len(data))
            ended = end // page_bytes
            part = pb.PagePart(data=data[start:end].tobytes(), checksums=page_checksums[num_sent:ended].tobytes())
            num_sent = ended
            await _write(context, pb.FetchResponse(part=part), self.bounds.taken_timeout_s)
        self._metrics.kv_sent.inc(len(data))


async def _read_message(context: Context, within_s: float, otherwise: str) -> Any:
    """The caller's next message. Raises DeadlineExceeded with `otherwise`."""
    try:
        async with asyncio.timeout(within_s):
            return await context.read()
    except TimeoutError:
        raise DeadlineExceeded(f"{otherwise} within {within_s:g} s") from None


async def _write(context: Context, message: pb.FetchResponse, within_s: float) -> None:
    """Raises DeadlineExceeded where the caller, which lives, takes nothing: it would hold up all others."""
    try:
        async with asyncio.timeout(within_s):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded(f"pages were not taken within {within_s:g} s") from None


async def _pieces(reader: PageReader, request: pb.PageRequest) -> AsyncGenerator[tuple[U32, Tensor], None]:
    """The next is being read while one is sent."""
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
    pages = await reader.read_pages(request.epoch, request.after_step, blocks)
    return await asyncio.to_thread(checksums, request.layout, hashes, pages.numpy()), pages
