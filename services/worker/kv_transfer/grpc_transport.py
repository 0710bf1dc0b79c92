"""Page transport over gRPC, for any two workers that can reach each other. Everything received is verified.

Between GPUs of one host gRPC carries only the location of the pages (peer_pages.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
import torch

from quire.services.worker.kv_transfer.checksums import Bytes2D, checksums
from quire.services.worker.kv_transfer.peer_pages import PeerBlocks, PeerPages, SharedPages
from quire.services.worker.kv_transfer.transport import FetchedPages, PageMismatch, WantedPages
from quire.shared import columns
from quire.shared.columns import U32, ColumnError
from quire.shared.errors import Unavailable
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import kv_transfer_pb2 as pb
from quire.shared.pb.worker.v1 import kv_transfer_pb2_grpc
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.connection_cache import MAX_CHANNELS, ConnectionCache
from quire.shared.rpc.trust import Dialler

log = logger("worker.kv_transfer")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["KVTransferService"].full_name
FIRST_PART_TIMEOUT_S = 30.0  # the source may first run a step or serve other callers
NEXT_PART_TIMEOUT_S = 5.0
MIN_BYTES_PER_S = 4 << 20  # of a whole fetch: bounds the time of a source that sends little at a time
UNREACHABLE_RETRY_S = 60.0  # a failed attempt costs a call and the driver's refusal: milliseconds

Call = grpc.aio.StreamStreamCall[pb.FetchRequest, pb.FetchResponse]


@dataclass(frozen=True, slots=True)
class FetchBounds:
    """Timeouts of a fetch and limits of the connection cache."""

    first_part_timeout_s: float = FIRST_PART_TIMEOUT_S
    next_part_timeout_s: float = NEXT_PART_TIMEOUT_S
    max_channels: int = MAX_CHANNELS
    unreachable_retry_s: float = UNREACHABLE_RETRY_S


BOUNDS = FetchBounds()


class GrpcTransport:
    """PageTransport over gRPC with a cache of connections to source workers."""

    def __init__(
        self,
        dialler: Dialler,
        piece_bytes: int,
        *,
        pinned: bool = False,
        peers: PeerPages | None = None,
        bounds: FetchBounds = BOUNDS,
    ) -> None:
        """`piece_bytes`: bytes of pages collected before they are yielded, in `pinned` memory; `peers`: opens pages on
        other GPUs of this host."""
        self._dialler, self._bounds = dialler, bounds
        self._pinned = pinned
        self._piece_bytes = piece_bytes
        self.connections = ConnectionCache(dialler, bounds.max_channels)
        self.peers = peers
        # Time of the next attempt by address, for workers on this host whose pages could not be opened.
        self.unreachable_until: dict[str, float] = {}

    async def fetch(self, wanted: WantedPages) -> AsyncGenerator[FetchedPages, None]:
        """Yields verified pages in order, as PageTransport.fetch; falls back to bytes over gRPC if shared pages cannot
        be opened, and remembers that for `unreachable_retry_s`. Raises QuireError."""
        try:
            async with aclosing(self._fetch(wanted, self._peers_for(wanted))) as batches:
                async for batch in batches:
                    yield batch
        except _PeerUnreachable as error:
            source = wanted.source
            log.info(
                "KV pages are fetched over gRPC, not from shared memory", source=source.worker_id, reason=str(error)
            )
            self.unreachable_until[source.address] = (
                asyncio.get_running_loop().time() + self._bounds.unreachable_retry_s
            )
            async with aclosing(self._fetch(wanted, None)) as batches:
                async for batch in batches:
                    yield batch

    def _peers_for(self, wanted: WantedPages) -> PeerPages | None:
        """Returns `peers`, or None where opening failed recently; entries expire, as another worker may take over the
        address."""
        now = asyncio.get_running_loop().time()
        self.unreachable_until = {address: until for address, until in self.unreachable_until.items() if until > now}
        return None if wanted.source.address in self.unreachable_until else self.peers

    async def _fetch(self, wanted: WantedPages, peers: PeerPages | None) -> AsyncGenerator[FetchedPages, None]:
        """Yields the pages of one call. `peers`: may open shared pages instead of receiving bytes. Raises Unavailable
        for timeouts and gRPC errors, which also evict the connection, PageMismatch, and _PeerUnreachable."""
        worker_id, address = wanted.source.worker_id, wanted.source.address
        async with self.connections.connected(address) as connection:
            call: Call = kv_transfer_pb2_grpc.KVTransferServiceStub(connection.channel).Fetch()
            try:
                async with asyncio.timeout(self._bounds.first_part_timeout_s):
                    await self.send_request(call, wanted, peers)
                async with aclosing(self._receive(call, wanted, peers)) as batches:
                    async for batch in batches:
                        yield batch
            except TimeoutError:
                self.connections.evict(address, connection)
                raise Unavailable(f"{worker_id} at {address} did not send its pages in time") from None
            except grpc.aio.AioRpcError as error:
                self.connections.evict(address, connection)
                raise Unavailable(f"{worker_id} at {address}: {error.details()}") from None
            except (asyncio.InvalidStateError, grpc.aio.InternalError):  # the call ended before its request was sent
                raise Unavailable(f"the call to {worker_id} at {address} ended while the request was sent") from None
            except asyncio.CancelledError:
                if is_cancel_requested():
                    raise
                raise Unavailable(f"the call to {worker_id} at {address} was cancelled on this side") from None
            finally:
                call.cancel()

    async def close(self) -> None:
        """Closes all connections, which cancels their calls, and the opened memory of other workers."""
        await self.connections.close()
        if self.peers is not None:
            await self.peers.close()

    async def send_request(self, call: Call, wanted: WantedPages, peers: PeerPages | None) -> None:
        """Authenticates the call and sends the request for pages; the call stays open for a confirmation if pages may
        be shared."""
        await self._dialler.handshake(call, pb.FetchRequest, SERVICE_NAME, wanted.source.address, known=False)
        request = pb.PageRequest(
            epoch=wanted.source.epoch,
            after_step=wanted.after_step,
            layout=wanted.layout,
            block_ids=columns.u32_bytes(wanted.blocks.tolist()),
            block_hashes=b"".join(wanted.hashes),
            host=peers.host if peers else b"",
        )
        await call.write(pb.FetchRequest(pages=request))
        if peers is None:
            await call.done_writing()

    async def _receive(
        self, call: Call, wanted: WantedPages, peers: PeerPages | None
    ) -> AsyncGenerator[FetchedPages, None]:
        """Yields pieces of verified pages from a call, or the location of shared pages. Raises TimeoutError if a part
        or the whole fetch is late, PageMismatch for wrong checksums or sizes."""
        incoming = _PageAssembler(wanted, max(1, self._piece_bytes // wanted.block_bytes), pinned=self._pinned)
        loop, num_bytes = asyncio.get_running_loop(), len(wanted.blocks) * wanted.block_bytes
        last_s = loop.time() + self._bounds.first_part_timeout_s + num_bytes / MIN_BYTES_PER_S
        timeout_s = self._bounds.first_part_timeout_s
        while True:
            async with asyncio.timeout(min(timeout_s, last_s - loop.time())):
                message: Any = await call.read()
            if message is grpc.aio.EOF:
                break
            timeout_s = self._bounds.next_part_timeout_s
            if peers is not None and message.WhichOneof("message") == "shared":
                async with aclosing(
                    _receive_shared(call, wanted, peers, SharedPages.of(message.shared), timeout_s)
                ) as copied:
                    async for batch in copied:
                        yield batch
                return
            for first, pages, expected in incoming.add(message):
                hashes = wanted.hashes[first : first + len(pages)]
                actual = await asyncio.to_thread(checksums, wanted.layout, hashes, pages)
                if not np.array_equal(actual, expected):
                    wrong = first + int(np.flatnonzero(actual != expected)[0])
                    raise PageMismatch(f"page {wrong} of {wanted.source.worker_id} does not match its checksum")
                yield FetchedPages(first, torch.from_numpy(pages))
        if not incoming.complete:
            raise PageMismatch(f"{wanted.source.worker_id} sent {incoming.text}")


class _PeerUnreachable(Exception):
    """Pages of this host that this process cannot open."""


async def _receive_shared(
    call: Call, wanted: WantedPages, peers: PeerPages, pages: SharedPages, timeout_s: float
) -> AsyncGenerator[FetchedPages, None]:
    """Yields the location of shared pages; after the consumer has copied them, the source confirms that they were still
    valid. Raises _PeerUnreachable if they cannot be opened, PageMismatch for missing blocks or further messages."""
    worker_id, last_block = wanted.source.worker_id, int(wanted.blocks.max())
    if last_block >= pages.num_blocks:
        raise PageMismatch(f"{worker_id} has {pages.num_blocks} blocks, and no block {last_block}")
    async with peers.opened(pages) as reason:
        if reason:
            raise _PeerUnreachable(reason)
        yield FetchedPages(0, PeerBlocks(pages, wanted.blocks))
    async with asyncio.timeout(timeout_s):
        await call.write(pb.FetchRequest(taken=pb.PagesTaken()))
        await call.done_writing()
        if await call.read() is not grpc.aio.EOF:
            raise PageMismatch(f"{worker_id} sent more than the location of its pages")


class _PageAssembler:
    """Assembles message parts into pages, one piece of several pages at a time."""

    def __init__(self, wanted: WantedPages, pages_at_a_time: int, *, pinned: bool) -> None:
        self._pinned = pinned
        self._worker_id = wanted.source.worker_id
        self._num_pages, self._page_bytes = len(wanted.blocks), wanted.block_bytes
        self._most = pages_at_a_time
        self._first = self._filled = 0  # first page of the current piece, and bytes received of it
        self._piece = self._next_piece()
        self._checksums: list[int] = []  # checksums received for the piece

    @property
    def complete(self) -> bool:
        return self._first == self._num_pages

    @property
    def text(self) -> str:
        """Describes for error messages how much was received: bytes for a number of pages."""
        return (
            f"{self._first * self._page_bytes + self._filled} bytes for {self._num_pages} pages of {self._page_bytes}"
        )

    def add(self, message: pb.FetchResponse) -> list[tuple[int, Bytes2D, U32]]:
        """Returns complete pieces as (first page, pages, expected checksums). Raises PageMismatch for other messages
        than parts, and for more bytes than were announced."""
        if message.WhichOneof("message") != "part" or not message.part.data:
            raise PageMismatch(f"{self._worker_id} sent {message.WhichOneof('message')}, expected bytes of pages")
        self._checksums += self._column(message.part.checksums)
        data = np.frombuffer(message.part.data, dtype=np.uint8)
        done = []
        while len(data):
            if self.complete:
                raise PageMismatch(
                    f"{self._worker_id} sent more than {self._num_pages} pages of {self._page_bytes} bytes"
                )
            count = min(len(data), self._piece.size - self._filled)
            self._piece.reshape(-1)[self._filled : self._filled + count] = data[:count]
            self._filled, data = self._filled + count, data[count:]
            if self._filled == self._piece.size:
                done.append(self._finish())
        return done

    def _finish(self) -> tuple[int, Bytes2D, U32]:
        """Returns the full piece as (first page, pages, expected checksums) and starts the next one. Raises
        PageMismatch if checksums are missing."""
        first, pages = self._first, self._piece
        expected, self._checksums = self._checksums[: len(pages)], self._checksums[len(pages) :]
        if len(expected) != len(pages):
            raise PageMismatch(f"{self._worker_id} sent {len(expected)} checksums for {len(pages)} pages")
        self._first, self._filled = first + len(pages), 0
        self._piece = self._next_piece()
        return first, pages, np.array(expected, dtype=np.uint32)

    def _next_piece(self) -> Bytes2D:
        """Allocates memory for the next piece, uint8 [pages of the piece, page_bytes]."""
        size = (min(self._most, self._num_pages - self._first), self._page_bytes)
        pages: Bytes2D = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned).numpy()
        return pages

    def _column(self, data: bytes) -> list[int]:
        """Decodes the checksums of a part. Raises PageMismatch for invalid or too many ones."""
        try:
            expected: list[int] = columns.u32(data).tolist()
        except ColumnError as error:
            raise PageMismatch(f"{self._worker_id} sent invalid checksums: {error}") from None
        if len(self._checksums) + len(expected) > self._num_pages - self._first:
            raise PageMismatch(f"{self._worker_id} sent more checksums than pages")
        return expected
