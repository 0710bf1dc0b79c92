"""Operations of clients on files and batches, for every edge. They never block the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import BinaryIO, Generic, NamedTuple, TypeVar

from quire.services.frontend.offline.batch import Batch
from quire.services.frontend.offline.batches import BatchStore
from quire.services.frontend.offline.files import FileStore, StoredFile
from quire.shared import batch_lines
from quire.shared.errors import InvalidArgument, NotFound, Unavailable, Unimplemented
from quire.shared.logs import logger

log = logger("batches")

WINDOW = "24h"
MAX_LISTED = 10_000
WRITE_BYTES = 1 << 20
RETRY_MS = 10_000

Listed = TypeVar("Listed", StoredFile, Batch)


class ListPage(NamedTuple, Generic[Listed]):
    """One page of a list."""

    shown: Sequence[Listed]
    has_more: bool


class OfflineOperations:
    """Operations of one frontend on the shared stores."""

    def __init__(self, files: FileStore | None, batches: BatchStore | None, notify: Callable[[], None]) -> None:
        """Wraps the stores of files and batches, which are None if no folder for them is configured. `notify` wakes
        the batch runner after a batch is created."""
        self._optional_files, self._optional_batches = files, batches
        self._notify = notify

    @property
    def files(self) -> FileStore:
        """Store of the files; raises Unimplemented if there is no folder."""
        if self._optional_files is None:
            raise Unimplemented("files and batches are disabled on this server; start it with --batch-folder")
        return self._optional_files

    @property
    def _batches(self) -> BatchStore:
        assert self.files is self._optional_files
        assert self._optional_batches is not None
        return self._optional_batches

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[tuple[Path, Path]]:
        """Reserves space for an upload and yields two temporary paths; both are deleted afterwards. Raises
        ResourceExhausted."""
        files = self.files
        temp_paths = files.temp_path(), files.temp_path()
        with files.reserve(num_bytes), _disk_errors():
            await asyncio.to_thread(files.check_space)
            try:
                yield temp_paths
            finally:
                await asyncio.to_thread(_unlink, *temp_paths)

    async def store(self, scratch: Path, tenant: str, filename: str, purpose: str) -> StoredFile:
        return await asyncio.to_thread(self.files.store, scratch, tenant, filename, purpose)

    async def file(self, file_id: str, tenant: str) -> StoredFile:
        return await asyncio.to_thread(self.files.get, file_id, tenant)

    async def open(self, file_id: str, tenant: str) -> BinaryIO:
        """Opens a file, which the caller must close."""
        return await asyncio.to_thread(self.files.open, file_id, tenant)

    async def delete(self, file_id: str, tenant: str) -> None:
        await asyncio.to_thread(self.files.delete, file_id, tenant)

    async def list_files(
        self, tenant: str, purpose: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> ListPage[StoredFile]:
        """Returns a page of at most `limit` files of the tenant after the file id `after` ("" is the first page),
        newest first by default. An empty `purpose` matches all files."""
        files = await asyncio.to_thread(self.files.list_for, tenant)
        wanted = [file for file in files if purpose in ("", file.purpose)]
        return _page(wanted[::-1] if oldest_first else wanted, after, limit)

    async def create(
        self, tenant: str, key: str, *, endpoint: str, input_file_id: str, window: str, metadata: Mapping[str, str]
    ) -> Batch:
        """Creates a batch and wakes the runner. `key` names the caller's API key, which is checked again for each
        line. Raises InvalidArgument for an endpoint, window or input file that is not accepted."""
        if endpoint not in batch_lines.ENDPOINTS:
            names = ", ".join(batch_lines.ENDPOINTS)
            raise InvalidArgument(f"endpoint must be one of {names}, got {endpoint[:64]!r}", field="endpoint")
        if window != WINDOW:
            raise InvalidArgument(f"completion_window must be {WINDOW}, got {window[:64]!r}", field="completion_window")
        try:
            await self.file(input_file_id, tenant)
        except NotFound as error:
            raise InvalidArgument(error.message, field="input_file_id") from None
        with _disk_errors():
            batch = await asyncio.to_thread(
                self._batches.create,
                tenant,
                key,
                endpoint=endpoint,
                input_file_id=input_file_id,
                metadata=dict(metadata) or None,
            )
        self._notify()
        return batch

    async def list_batches(self, tenant: str, after: str, limit: int) -> ListPage[Batch]:
        return _page(await asyncio.to_thread(self._batches.list_for, tenant), after, limit)

    async def batch(self, batch_id: str, tenant: str) -> tuple[Batch, bool]:
        """Returns a batch, and whether its cancellation was requested."""
        batch = await asyncio.to_thread(self._batches.get, batch_id, tenant)
        return batch, await asyncio.to_thread(self._batches.is_cancelled, batch_id)

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        return await asyncio.to_thread(self._batches.cancel, batch_id, tenant)


@contextmanager
def _disk_errors() -> Iterator[None]:
    """Raises Unavailable for disk errors (full, read-only or gone), which may be repaired."""
    try:
        yield
    except OSError as error:
        log.warning("cannot store files", reason=str(error))
        raise Unavailable(
            f"cannot store files at present: {error.strerror}; retry later", retry_after_ms=RETRY_MS
        ) from None


async def write_chunks(chunks: AsyncIterator[bytes], target: Path) -> int:
    """Writes the chunks to `target` in threads, WRITE_BYTES at a time, and returns the number of bytes."""
    buffer, num_bytes = bytearray(), 0
    async for chunk in chunks:
        buffer += chunk
        num_bytes += len(chunk)
        if len(buffer) >= WRITE_BYTES:
            await asyncio.to_thread(_append, target, bytes(buffer))
            buffer.clear()
    await asyncio.to_thread(_append, target, bytes(buffer))
    return num_bytes


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _unlink(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _page(entries: Sequence[Listed], after: str, limit: int) -> ListPage[Listed]:
    """Returns at most `limit` entries after the one with id `after`; an unknown id gives the first page. Raises
    InvalidArgument for a limit out of bounds."""
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidArgument(f"limit must be in 1 to {MAX_LISTED}, got {limit}", field="limit")
    ids = [entry.id for entry in entries]
    start = ids.index(after) + 1 if after in ids else 0
    return ListPage(entries[start : start + limit], start + limit < len(entries))
