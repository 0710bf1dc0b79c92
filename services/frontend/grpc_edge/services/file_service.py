"""quire.batch.v1.FileService: files in pieces, on the same store as /v1/files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import BinaryIO

from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.grpc_edge.errors import Context, call_context
from quire.services.frontend.grpc_edge.requests import arrival_of, tenant
from quire.services.frontend.grpc_edge.stalled_streams import with_timeout
from quire.services.frontend.offline.files import StoredFile
from quire.services.frontend.offline.operations import MAX_LISTED, OfflineOperations, write_chunks
from quire.shared.errors import InvalidArgument
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.batch.v1 import batch_pb2 as pb
from quire.shared.pb.batch.v1 import batch_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["FileService"].full_name
MAX_PIECE_BYTES = 1 << 20
SENT_BYTES = 1 << 18  # size of the pieces sent
STALLED_S = 60.0  # an upload without data for this long is aborted


class FileService(batch_pb2_grpc.FileServiceServicer):
    """gRPC service for files of batches: converts messages; the file operations decide."""

    def __init__(
        self, work: OfflineOperations, metrics: FrontendMetrics, calls: Calls, stalled_s: float = STALLED_S
    ) -> None:
        self._stalled_s = stalled_s
        self._work = work
        self._metrics = metrics
        self._calls = calls

    async def UploadFile(
        self, messages: AsyncIterator[pb.UploadFileRequest], context: Context
    ) -> pb.UploadFileResponse:
        """Stores a streamed file. The first message announces its length, which is reserved on disk and must match the
        content. Raises InvalidArgument; DeadlineExceeded if the stream stalls."""
        async with call_context("UploadFile", context, self._metrics, self._calls) as call:
            first = await anext(with_timeout(messages, self._stalled_s), None)
            if first is None or not first.HasField("begin"):
                raise InvalidArgument("begin: the first message must describe the file", field="begin")
            begin, most = first.begin, self._work.files.max_file_bytes
            owner = _tenant(begin.tenant, context, call)
            if begin.bytes > most:
                raise InvalidArgument(f"bytes: a file may have at most {most}, got {begin.bytes}", field="bytes")
            async with self._work.reserve(begin.bytes) as (scratch, _):
                await write_chunks(_content(with_timeout(messages, self._stalled_s), begin.bytes), scratch)
                stored = await self._work.store(scratch, owner, begin.filename, begin.purpose)
            return pb.UploadFileResponse(file=_message(stored))

    async def GetFile(self, message: pb.GetFileRequest, context: Context) -> pb.GetFileResponse:
        """Returns the description of a file of the tenant, without its content."""
        async with call_context("GetFile", context, self._metrics, self._calls) as call:
            found = await self._work.file(message.file_id, _tenant(message.tenant, context, call))
            return pb.GetFileResponse(file=_message(found))

    async def ListFiles(self, message: pb.ListFilesRequest, context: Context) -> pb.ListFilesResponse:
        """Returns one page of the tenant's files, those after the id `after`."""
        async with call_context("ListFiles", context, self._metrics, self._calls) as call:
            owner, limit = _tenant(message.tenant, context, call), message.limit or MAX_LISTED
            page = await self._work.list_files(owner, message.purpose, message.after, limit)
            return pb.ListFilesResponse(files=map(_message, page.shown), has_more=page.has_more)

    async def DownloadFile(self, message: pb.DownloadFileRequest, context: Context) -> None:
        """Streams a file's content from the offset on. Raises InvalidArgument for an offset beyond its end."""
        async with call_context("DownloadFile", context, self._metrics, self._calls) as call:
            owner = _tenant(message.tenant, context, call)
            stored = await self._work.file(message.file_id, owner)
            if message.offset > stored.bytes:
                text = f"offset: the file has {stored.bytes} bytes, got {message.offset}"
                raise InvalidArgument(text, field="offset")
            with await self._work.open(message.file_id, owner) as file:
                file.seek(message.offset)
                await _send(file, context)

    async def DeleteFile(self, message: pb.DeleteFileRequest, context: Context) -> pb.DeleteFileResponse:
        async with call_context("DeleteFile", context, self._metrics, self._calls) as call:
            await self._work.delete(message.file_id, _tenant(message.tenant, context, call))
            return pb.DeleteFileResponse()


async def _send(file: BinaryIO, context: Context) -> None:
    """Sends a file; the next piece is read when the client can receive it."""
    while content := await asyncio.to_thread(file.read, SENT_BYTES):
        await context.write(pb.DownloadFileResponse(content=content))


async def _content(messages: AsyncIterator[pb.UploadFileRequest], announced: int) -> AsyncIterator[bytes]:
    """Yields the file's content. Raises InvalidArgument if its length differs from the announced one, or a message has
    no content or more than MAX_PIECE_BYTES."""
    num_bytes = 0
    async for message in messages:
        if not message.HasField("content"):
            raise InvalidArgument("content: every message after the first must have content", field="content")
        if len(message.content) > MAX_PIECE_BYTES:
            text = f"content: a piece may have at most {MAX_PIECE_BYTES} bytes, got {len(message.content)}"
            raise InvalidArgument(text, field="content")
        num_bytes += len(message.content)
        if num_bytes > announced:
            break
        yield message.content
    if num_bytes != announced:
        found = f"more than {announced}" if num_bytes > announced else str(num_bytes)
        raise InvalidArgument(f"bytes: {announced} were announced, {found} received", field="bytes")


def _tenant(claimed: str, context: Context, call: Call) -> str:
    return tenant(claimed, arrival_of(context), call)


def _message(file: StoredFile) -> pb.File:
    return pb.File(
        id=file.id, filename=file.filename, purpose=file.purpose, bytes=file.bytes, created_at=file.created_at
    )
