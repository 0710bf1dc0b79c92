"""Fetches rows of media items from encode workers (quire/worker/v1/media_rows.proto). Sizes, times and checksums are
checked; the caller checks what the rows are for."""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np

from quire.services.worker.step.fetched_item import Rows
from quire.shared.errors import Unavailable
from quire.shared.pb.worker.v1 import media_rows_pb2 as pb
from quire.shared.pb.worker.v1 import media_rows_pb2_grpc, worker_pb2
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.connection_cache import ConnectionCache
from quire.shared.rpc.trust import Dialler

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["MediaRowsService"].full_name

Call = grpc.aio.StreamStreamCall[pb.FetchRowsRequest, pb.FetchRowsResponse]


@dataclass(frozen=True, slots=True)
class RowBounds:
    """Limits of one fetch."""

    max_bytes: int = 1 << 30  # 16,384 rows of 8,192 numbers with three layers of deepstack
    first_part_timeout_s: float = 5.0  # the rows are kept: nothing is computed first
    next_part_timeout_s: float = 5.0
    min_bytes_per_s: int = 4 << 20  # of a whole fetch: bounds the time of a worker that sends little at a time


BOUNDS = RowBounds()


class GrpcRows:
    """RowSource over gRPC, mutually authenticated if there is a cluster secret."""

    def __init__(self, dialler: Dialler, layout: bytes, bounds: RowBounds = BOUNDS) -> None:
        """`layout`: digest of what rows depend on (Encoder.layout); workers with another one refuse."""
        self._dialler, self._layout, self._bounds = dialler, layout, bounds
        self._connections = ConnectionCache(dialler)

    async def fetch(self, identifier: bytes, num_rows: int, source: worker_pb2.RowsSource) -> Rows:
        """Returns the rows of an item, uint8 [num_rows, bytes of a row]. Raises Unavailable, also for another number of
        rows than `num_rows`, and Unauthenticated."""
        worker = f"{source.worker_id} at {source.address}"
        request = pb.RowsRequest(epoch=source.epoch, layout=self._layout, identifier=identifier)
        async with self._connections.connected(source.address) as connection:
            call: Call = media_rows_pb2_grpc.MediaRowsServiceStub(connection.channel).FetchRows()
            try:
                async with asyncio.timeout(self._bounds.first_part_timeout_s):
                    await self._request(call, request, source.address)
                    head = await _head(call, worker)
                return await self._receive(call, head, num_rows, worker)
            except TimeoutError:
                self._connections.evict(source.address, connection)
                raise Unavailable(f"{worker} did not send the rows in time") from None
            except grpc.aio.AioRpcError as error:
                self._connections.evict(source.address, connection)
                raise Unavailable(f"{worker}: {error.details()}") from None
            except (asyncio.InvalidStateError, grpc.aio.InternalError):  # the call ended before its request was sent
                raise Unavailable(f"the call to {worker} ended while the request was sent") from None
            except asyncio.CancelledError:
                if is_cancel_requested():
                    raise
                raise Unavailable(f"the call to {worker} was cancelled on this side") from None
            finally:
                call.cancel()

    async def close(self) -> None:
        """Closes all connections, which cancels their calls."""
        await self._connections.close()

    async def _request(self, call: Call, request: pb.RowsRequest, address: str) -> None:
        """Authenticates the call and asks for rows."""
        await self._dialler.handshake(call, pb.FetchRowsRequest, SERVICE_NAME, address, known=False)
        await call.write(pb.FetchRowsRequest(rows=request))
        await call.done_writing()

    async def _receive(self, call: Call, head: pb.RowsHead, num_rows: int, worker: str) -> Rows:
        """Returns the rows that `head` describes. Raises Unavailable for other sizes than it states, too many bytes,
        and a wrong checksum; TimeoutError if a part or the whole is late."""
        size, most = head.num_rows * head.row_bytes, self._bounds.max_bytes
        if head.num_rows != num_rows or not 0 < size <= most:
            text = f"{head.num_rows} rows of {head.row_bytes} bytes, not {num_rows} rows of at most {most} bytes"
            raise Unavailable(f"{worker} announced {text}")
        data, received = np.empty(size, dtype=np.uint8), 0
        async with asyncio.timeout(self._bounds.first_part_timeout_s + size / self._bounds.min_bytes_per_s):
            while (part := await self._part(call, worker)) is not None:
                if not part or received + len(part) > size:
                    raise Unavailable(f"{worker} sent {received + len(part)} of {size} bytes")
                data[received : received + len(part)] = np.frombuffer(part, dtype=np.uint8)
                received += len(part)
        if received != size:
            raise Unavailable(f"{worker} sent {received} of {size} bytes")
        if await asyncio.to_thread(zlib.crc32, data.data) != head.checksum:
            raise Unavailable(f"the rows of {worker} do not match their checksum")
        return data.reshape(num_rows, head.row_bytes)

    async def _part(self, call: Call, worker: str) -> bytes | None:
        """Returns the next bytes; None at the end. Raises Unavailable for other messages, TimeoutError if it is
        late."""
        async with asyncio.timeout(self._bounds.next_part_timeout_s):
            message: Any = await call.read()
        if message is grpc.aio.EOF:
            return None
        if message.WhichOneof("message") != "part":
            raise Unavailable(f"{worker} sent {message.WhichOneof('message')} instead of bytes of rows")
        part: bytes = message.part
        return part


async def _head(call: Call, worker: str) -> pb.RowsHead:
    """Returns the first message of an answer. Raises Unavailable for any other."""
    message: Any = await call.read()
    kind = "nothing" if message is grpc.aio.EOF else message.WhichOneof("message")
    if kind != "head":
        raise Unavailable(f"{worker} sent {kind} instead of the size of the rows")
    head: pb.RowsHead = message.head
    return head
