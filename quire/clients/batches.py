"""Files and batches of a cluster: `client.files` and `client.batches`, modelled on OpenAI's client."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import grpc

from quire.clients.refused_streams import await_answer
from quire.rpc_errors import from_rpc, translated_errors
from quire.shared.errors import DeadlineExceeded, InvalidArgument
from quire.shared.pb.batch.v1 import batch_pb2 as pb

PIECE_BYTES = 48 * 1024  # small enough for a frontend to handle in its event loop
POLL_S = 0.5
ENDED = {
    pb.BATCH_STATUS_COMPLETED,
    pb.BATCH_STATUS_FAILED,
    pb.BATCH_STATUS_CANCELLED,
    pb.BATCH_STATUS_EXPIRED,
}
Sent = str | Path | bytes  # a path, or the bytes themselves


class FilePage(NamedTuple):
    """One page of files; `has_more`: more follow after the last one."""

    files: list[pb.File]
    has_more: bool


class BatchPage(NamedTuple):
    """One page of batches."""

    batches: list[pb.Batch]
    has_more: bool


class _OfTenant:
    """Base of the clients below: uses the API key's tenant, or, without keys, the given one."""

    def __init__(self, stub: Any, tenant: str = "") -> None:
        self._stub, self._tenant = stub, tenant

    def for_tenant(self, tenant: str) -> Self:
        """Returns the same client for another tenant."""
        return type(self)(self._stub, tenant)


class Files(_OfTenant):
    """Blocking client for files."""

    def create(self, file: Sent, purpose: str = "batch", filename: str = "") -> pb.File:
        """Uploads a file, given as a path or bytes."""
        with translated_errors():
            messages = _upload(file, purpose, filename, self._tenant)
            return self._stub.UploadFile(messages).file  # type: ignore[no-any-return]

    def retrieve(self, file_id: str) -> pb.File:
        """Returns the metadata of a file."""
        with translated_errors():
            return self._stub.GetFile(pb.GetFileRequest(file_id=file_id, tenant=self._tenant)).file  # type: ignore[no-any-return]

    def list(self, purpose: str = "", after: str = "", limit: int = 0) -> FilePage:
        """Returns a page of the tenant's files after the id `after`, newest first; `limit` of 0 is the server's
        default."""
        request = pb.ListFilesRequest(purpose=purpose, after=after, limit=limit, tenant=self._tenant)
        with translated_errors():
            answer = self._stub.ListFiles(request)
        return FilePage(list(answer.files), answer.has_more)

    def content(self, file_id: str) -> bytes:
        """Returns the whole contents."""
        return b"".join(self.pieces(file_id))

    def pieces(self, file_id: str, offset: int = 0) -> Iterator[bytes]:
        """Yields the contents in pieces from byte `offset` on; leaving the loop early cancels the download."""
        call = self._stub.DownloadFile(pb.DownloadFileRequest(file_id=file_id, offset=offset, tenant=self._tenant))
        try:
            with translated_errors():
                for message in call:
                    yield message.content
        finally:
            call.cancel()

    def delete(self, file_id: str) -> None:
        """Deletes a file."""
        with translated_errors():
            self._stub.DeleteFile(pb.DeleteFileRequest(file_id=file_id, tenant=self._tenant))


class Batches(_OfTenant):
    """Blocking client for batches."""

    def create(self, input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None = None) -> pb.Batch:
        """Starts a batch for a file of requests."""
        request = _creation(input_file_id, endpoint, metadata, self._tenant)
        with translated_errors():
            return self._stub.CreateBatch(request).batch  # type: ignore[no-any-return]

    def retrieve(self, batch_id: str) -> pb.Batch:
        """Returns the state of a batch."""
        with translated_errors():
            return self._stub.GetBatch(pb.GetBatchRequest(batch_id=batch_id, tenant=self._tenant)).batch  # type: ignore[no-any-return]

    def list(self, after: str = "", limit: int = 0) -> BatchPage:
        """Lists batches, newest first."""
        with translated_errors():
            answer = self._stub.ListBatches(pb.ListBatchesRequest(after=after, limit=limit, tenant=self._tenant))
        return BatchPage(list(answer.batches), answer.has_more)

    def cancel(self, batch_id: str) -> pb.Batch:
        """Cancels a batch; lines in progress are still answered."""
        with translated_errors():
            return self._stub.CancelBatch(pb.CancelBatchRequest(batch_id=batch_id, tenant=self._tenant)).batch  # type: ignore[no-any-return]

    def wait(self, batch_id: str, timeout_s: float | None = None) -> pb.Batch:
        """Polls the batch until it has ended and returns it; raises DeadlineExceeded after `timeout_s` seconds
        (None: no limit)."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (batch := self.retrieve(batch_id)).status not in ENDED:
            if until_s is not None and time.monotonic() > until_s:
                raise _unended(batch)
            time.sleep(POLL_S)
        return batch


class AsyncFiles(_OfTenant):
    """Asyncio version of Files."""

    async def create(self, file: Sent, purpose: str = "batch", filename: str = "") -> pb.File:
        messages = _read_apart(_upload(file, purpose, filename, self._tenant))
        return (await await_answer(self._stub.UploadFile(messages))).file  # type: ignore[no-any-return]

    async def retrieve(self, file_id: str) -> pb.File:
        request = pb.GetFileRequest(file_id=file_id, tenant=self._tenant)
        return (await _answered(self._stub.GetFile(request))).file  # type: ignore[no-any-return]

    async def list(self, purpose: str = "", after: str = "", limit: int = 0) -> FilePage:
        request = pb.ListFilesRequest(purpose=purpose, after=after, limit=limit, tenant=self._tenant)
        answer = await _answered(self._stub.ListFiles(request))
        return FilePage(list(answer.files), answer.has_more)

    async def content(self, file_id: str) -> bytes:
        return b"".join([piece async for piece in self.pieces(file_id)])

    async def pieces(self, file_id: str, offset: int = 0) -> AsyncIterator[bytes]:
        """Yields a file's content from byte `offset` on in pieces; the call is cancelled when the iteration ends."""
        call = self._stub.DownloadFile(pb.DownloadFileRequest(file_id=file_id, offset=offset, tenant=self._tenant))
        try:
            async for message in call:
                yield message.content
        except grpc.RpcError as error:
            raise from_rpc(error) from None
        finally:
            call.cancel()

    async def delete(self, file_id: str) -> None:
        await _answered(self._stub.DeleteFile(pb.DeleteFileRequest(file_id=file_id, tenant=self._tenant)))


class AsyncBatches(_OfTenant):
    """Asyncio version of Batches."""

    async def create(self, input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None = None) -> pb.Batch:
        request = _creation(input_file_id, endpoint, metadata, self._tenant)
        return (await _answered(self._stub.CreateBatch(request))).batch  # type: ignore[no-any-return]

    async def retrieve(self, batch_id: str) -> pb.Batch:
        request = pb.GetBatchRequest(batch_id=batch_id, tenant=self._tenant)
        return (await _answered(self._stub.GetBatch(request))).batch  # type: ignore[no-any-return]

    async def list(self, after: str = "", limit: int = 0) -> BatchPage:
        request = pb.ListBatchesRequest(after=after, limit=limit, tenant=self._tenant)
        answer = await _answered(self._stub.ListBatches(request))
        return BatchPage(list(answer.batches), answer.has_more)

    async def cancel(self, batch_id: str) -> pb.Batch:
        request = pb.CancelBatchRequest(batch_id=batch_id, tenant=self._tenant)
        return (await _answered(self._stub.CancelBatch(request))).batch  # type: ignore[no-any-return]

    async def wait(self, batch_id: str, timeout_s: float | None = None) -> pb.Batch:
        """Polls the batch until it has ended and returns it; raises DeadlineExceeded after `timeout_s` seconds
        (None: no limit)."""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        while (batch := await self.retrieve(batch_id)).status not in ENDED:
            if until_s is not None and time.monotonic() > until_s:
                raise _unended(batch)
            await asyncio.sleep(POLL_S)
        return batch


async def _answered(call: Any) -> Any:
    """Awaits a call; a gRPC error is raised as the matching QuireError."""
    try:
        return await call
    except grpc.RpcError as error:
        raise from_rpc(error) from None


def _unended(batch: pb.Batch) -> DeadlineExceeded:
    return DeadlineExceeded(f"batch {batch.id} has {batch.completed + batch.failed} of {batch.total} answers")


def _creation(
    input_file_id: str, endpoint: str, metadata: Mapping[str, str] | None, tenant: str
) -> pb.CreateBatchRequest:
    return pb.CreateBatchRequest(input_file_id=input_file_id, endpoint=endpoint, metadata=metadata or {}, tenant=tenant)


def _upload(file: Sent, purpose: str, filename: str, tenant: str) -> Iterator[pb.UploadFileRequest]:
    """Returns the messages of an upload. Raises InvalidArgument for an unreadable file."""
    if isinstance(file, bytes):
        begin = pb.NewFile(filename=filename, purpose=purpose, bytes=len(file), tenant=tenant)
        pieces: Iterator[bytes] = (file[at : at + PIECE_BYTES] for at in range(0, len(file), PIECE_BYTES))
    else:
        path = Path(file)
        try:
            with path.open("rb") as opened:  # gRPC would hide the reason of a read error
                num_bytes = os.fstat(opened.fileno()).st_size
        except OSError as error:
            raise InvalidArgument(f"file: cannot read {str(path)!r}: {error.strerror}", field="file") from None
        begin = pb.NewFile(filename=filename or path.name, purpose=purpose, bytes=num_bytes, tenant=tenant)
        pieces = _pieces_of(path)
    return _messages(begin, pieces)


def _messages(begin: pb.NewFile, pieces: Iterator[bytes]) -> Iterator[pb.UploadFileRequest]:
    yield pb.UploadFileRequest(begin=begin)
    for piece in pieces:
        yield pb.UploadFileRequest(content=piece)


def _pieces_of(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while piece := file.read(PIECE_BYTES):
            yield piece


async def _read_apart(messages: Iterator[pb.UploadFileRequest]) -> AsyncIterator[pb.UploadFileRequest]:
    """Reads the file in a thread, so that a slow disk does not block the event loop."""
    while (message := await asyncio.to_thread(next, messages, None)) is not None:
        yield message
