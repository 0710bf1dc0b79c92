"""What clients may do with files and batches, whichever edge they come through. Nothing here blocks the loop."""

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
    """Some of a list."""

    shown: Sequence[Listed]
    has_more: bool


class OfflineOperations:
    """Of one frontend, on the stores that all share."""

    def __init__(self, files: FileStore | None, batches: BatchStore | None, notify: Callable[[], None]) -> None:
        """`files`, `batches`: None where there is no folder for them. `notify`: whoever runs batches."""
        self._held_files, self._held_batches = files, batches
        self._notify = notify

    @property
    def files(self) -> FileStore:
        """Raises Unimplemented."""
        if self._held_files is None:
            raise Unimplemented("files and batches are not offered by this server: it has no --batch-folder")
        return self._held_files

    @property
    def _batches(self) -> BatchStore:
        assert self.files is self._held_files
        assert self._held_batches is not None
        return self._held_batches

    @asynccontextmanager
    async def reserve(self, num_bytes: int) -> AsyncIterator[tuple[Path, Path]]:
        """Room for a file that is about to come, and two places where it may be gathered until it is kept; nothing of
        them stays. Raises ResourceExhausted."""
        files = self.files
        scratches = files.temp_path(), files.temp_path()
        with files.reserve(num_bytes), _kept():
            await asyncio.to_thread(files.check_space)
            try:
                yield scratches
            finally:
                await asyncio.to_thread(_forget, *scratches)

    async def store(self, scratch: Path, tenant: str, filename: str, purpose: str) -> StoredFile:
        return await asyncio.to_thread(self.files.store, scratch, tenant, filename, purpose)

    async def file(self, file_id: str, tenant: str) -> StoredFile:
        return await asyncio.to_thread(self.files.get, file_id, tenant)

    async def open(self, file_id: str, tenant: str) -> BinaryIO:
        """Whose turn it is to close it."""
        return await asyncio.to_thread(self.files.open, file_id, tenant)

    async def delete(self, file_id: str, tenant: str) -> None:
        await asyncio.to_thread(self.files.delete, file_id, tenant)

    async def list_files(
        self, tenant: str, purpose: str, after: str, limit: int, *, oldest_first: bool = False
    ) -> ListPage[StoredFile]:
        found = await asyncio.to_thread(self.files.list_for, tenant)
        wanted = [file for file in found if purpose in ("", file.purpose)]
        return _page(wanted[::-1] if oldest_first else wanted, after, limit)

    async def create(
        self, tenant: str, key: str, *, endpoint: str, input_file_id: str, window: str, metadata: Mapping[str, str]
    ) -> Batch:
        """`key`: the name of the caller's, if it has shown one."""
        if endpoint not in batch_lines.ENDPOINTS:
            names = ", ".join(batch_lines.ENDPOINTS)
            raise InvalidArgument(f"endpoint must be one of {names}, got {endpoint[:64]!r}", field="endpoint")
        if window != WINDOW:
            raise InvalidArgument(f"completion_window must be {WINDOW}, got {window[:64]!r}", field="completion_window")
        try:
            await self.file(input_file_id, tenant)
        except NotFound as error:
            raise InvalidArgument(error.message, field="input_file_id") from None
        with _kept():
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
        """And whether it has been asked to end."""
        found = await asyncio.to_thread(self._batches.get, batch_id, tenant)
        return found, await asyncio.to_thread(self._batches.is_cancelled, batch_id)

    async def cancel(self, batch_id: str, tenant: str) -> Batch:
        return await asyncio.to_thread(self._batches.cancel, batch_id, tenant)


@contextmanager
def _kept() -> Iterator[None]:
    """A disk that is full, read-only or gone is no fault of ours, and may be mended."""
    try:
        yield
    except OSError as error:
        log.warning("files cannot be kept", reason=str(error))
        raise Unavailable(f"nothing can be kept here at present: {error.strerror}", retry_after_ms=RETRY_MS) from None


async def write_chunks(chunks: AsyncIterator[bytes], target: Path) -> int:
    """How many bytes there were."""
    kept, num_bytes = bytearray(), 0
    async for chunk in chunks:
        kept += chunk
        num_bytes += len(chunk)
        if len(kept) >= WRITE_BYTES:
            await asyncio.to_thread(_append, target, bytes(kept))
            kept.clear()
    await asyncio.to_thread(_append, target, bytes(kept))
    return num_bytes


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def _forget(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _page(found: Sequence[Listed], after: str, limit: int) -> ListPage[Listed]:
    """`after`: the id of the last one of the page before."""
    if not 1 <= limit <= MAX_LISTED:
        raise InvalidArgument(f"limit must be in 1 to {MAX_LISTED}, got {limit}", field="limit")
    ids = [one.id for one in found]
    start = ids.index(after) + 1 if after in ids else 0
    return ListPage(found[start : start + limit], start + limit < len(found))
