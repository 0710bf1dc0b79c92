"""MediaRowsService: serves the rows of media items to other workers that the scheduler has sent."""

from __future__ import annotations

import asyncio
import zlib
from typing import Any, Protocol

import grpc.aio

from quire.services.worker.media.grpc_rows import SERVICE_NAME
from quire.services.worker.step.fetched_item import Rows
from quire.shared.errors import FailedPrecondition, QuireError, Unavailable, transport
from quire.shared.pb.worker.v1 import media_rows_pb2 as pb
from quire.shared.pb.worker.v1 import media_rows_pb2_grpc
from quire.shared.rpc.parts import MAX_PART_BYTES
from quire.shared.rpc.timed_messages import read_message, write_message
from quire.shared.rpc.trust import HandshakeAcceptor

MAX_SERVED = 4  # callers at a time; further ones are queued
REQUEST_TIMEOUT_S = 5.0  # from the start of a call to its request
WRITE_TIMEOUT_S = 10.0  # for a caller to receive a part

Context = grpc.aio.ServicerContext[pb.FetchRowsRequest, pb.FetchRowsResponse]


class RowReader(Protocol):
    """Reads the rows that a worker keeps."""

    @property
    def layout(self) -> bytes:
        """Digest of what the rows depend on (Encoder.layout)."""

    async def read_rows(self, epoch: int, identifier: bytes) -> Rows:
        """Returns rows in host memory, uint8 [num_rows, bytes of a row]. Raises FailedPrecondition if the worker is not
        in that epoch, NotFound for items that are not kept."""


class RowsService(media_rows_pb2_grpc.MediaRowsServiceServicer):
    """Serves rows, with a bounded number of items in transit."""

    def __init__(self, door: HandshakeAcceptor) -> None:
        self._door = door
        self._reader: RowReader | None = None
        self._semaphore = asyncio.Semaphore(MAX_SERVED)

    def serve(self, reader: RowReader) -> None:
        """Starts serving the rows of `reader`, once the worker is built; until then calls are answered with
        UNAVAILABLE."""
        self._reader = reader

    async def FetchRows(self, _requests: object, context: Context) -> None:
        """Authenticates the caller, and sends the rows of the item that it asks for, part by part. A QuireError ends
        the call with its gRPC code."""
        try:
            await self._door.authenticate(context, pb.FetchRowsResponse, SERVICE_NAME)
            request = self._checked(await read_message(context, REQUEST_TIMEOUT_S, "no request was received"))
            async with self._semaphore:
                if self._reader is None:
                    raise Unavailable("this worker does not serve rows")
                if request.layout != self._reader.layout:
                    raise FailedPrecondition("layout: the caller's rows differ from this worker's", field="layout")
                await _send(context, await self._reader.read_rows(request.epoch, request.identifier))
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    def _checked(self, message: Any) -> pb.RowsRequest:
        """Returns the request in a call's first message. Raises FailedPrecondition for another message."""
        kind = None if message is grpc.aio.EOF else message.WhichOneof("message")
        if kind != "rows":
            raise self._door.unexpected_handshake(kind) or FailedPrecondition(
                f"the first message of a call must be rows, got {kind or 'none'}"
            )
        request: pb.RowsRequest = message.rows
        return request


async def _send(context: Context, rows: Rows) -> None:
    """Sends the head and the parts. Raises DeadlineExceeded if the caller does not read one in time."""
    data = rows.reshape(-1)
    checksum = await asyncio.to_thread(zlib.crc32, data.data)
    head = pb.RowsHead(num_rows=rows.shape[0], row_bytes=rows.shape[1], checksum=checksum)
    await _write(context, pb.FetchRowsResponse(head=head))
    for start in range(0, len(data), MAX_PART_BYTES):
        await _write(context, pb.FetchRowsResponse(part=data[start : start + MAX_PART_BYTES].tobytes()))


async def _write(context: Context, message: pb.FetchRowsResponse) -> None:
    """Sends a message, within a time, because the caller occupies one of MAX_SERVED slots."""
    await write_message(context, message, WRITE_TIMEOUT_S, "the caller did not read the rows")
