"""Pages in the memory of another GPU of this host, copied from GPU to GPU.

The source worker sends the location of its pages; this worker opens that memory and its copy engine reads the blocks.
An open handle keeps the memory allocated even after the source process has died, so it is closed soon after the last
copy, long before a restarted source measures its free memory. A started copy uses the memory until it has finished,
even if the fetch was cancelled."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from torch import Tensor

from quire.services.worker.device.peer_driver import HANDLE_BYTES, PeerDriver, PeerMemoryError, PitchedRows
from quire.shared.columns import U32
from quire.shared.logs import logger
from quire.shared.pb.worker.v1 import kv_transfer_pb2 as pb

log = logger("worker.kv_transfer")

IDLE_S = 2.0
MAX_PITCH = (1 << 31) - 1  # bytes between the rows of one copy; limit of the driver
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Location of a worker's pages: quire.worker.v1.SharedPages."""

    handle: bytes
    offset: int
    num_parts: int
    num_blocks: int
    part_bytes: int

    @classmethod
    def of(cls, message: pb.SharedPages) -> SharedPages:
        return cls(message.handle, message.offset, message.num_parts, message.num_blocks, message.part_bytes)

    def to_proto(self) -> pb.SharedPages:
        return pb.SharedPages(
            handle=self.handle,
            offset=self.offset,
            num_parts=self.num_parts,
            num_blocks=self.num_blocks,
            part_bytes=self.part_bytes,
        )

    @property
    def end(self) -> int:
        return self.offset + self.num_parts * self.num_blocks * self.part_bytes


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """Blocks of another worker's pages, whose memory is open."""

    pages: SharedPages
    blocks: U32

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(slots=True)
class _OpenedMemory:
    """Opened allocation of another process: its local address and number of users."""

    address: int
    num_users: int = 0


class PeerPages:
    """Shares one worker's pages and copies from those of others. Used on its event loop and its device thread."""

    def __init__(
        self, whole: Tensor, driver: PeerDriver, *, max_pitch: int = MAX_PITCH, idle_s: float = IDLE_S
    ) -> None:
        """Exports the handle of `whole`.

        `whole`: int64 [num_parts, num_blocks, words], on the GPU whose context is current; `max_pitch`: bytes between
        the rows of one copy; `idle_s`: how long unused memory stays open. Raises PeerMemoryError."""
        self._max_pitch, self._idle_s = max_pitch, idle_s
        num_parts, num_blocks, words = whole.shape
        self._whole, self._driver, self._context = whole, driver, driver.current_context()
        base, _size = driver.allocation_range(whole.data_ptr())
        offset = whole.data_ptr() - base
        self.own = SharedPages(driver.export_handle(whole.data_ptr()), offset, num_parts, num_blocks, words * 8)
        self.host = BOOT.read_bytes().strip()
        self._opened: dict[bytes, _OpenedMemory] = {}
        self._driver_lock = threading.Lock()  # guards opening and closing, which may take long
        self._lock = threading.Lock()  # guards user counts; the only lock of the device thread

    @classmethod
    def of(cls, whole: Tensor, load_driver: Callable[[], PeerDriver] = PeerDriver.load) -> PeerPages | None:
        """Creates the sharing of `whole`; returns None if other processes cannot open it."""
        try:
            return cls(whole, load_driver())
        except (OSError, PeerMemoryError) as error:
            log.info("KV pages are copied through host memory, not between GPUs", reason=str(error))
            return None

    @asynccontextmanager
    async def opened(self, pages: SharedPages) -> AsyncIterator[str]:
        """Opens the pages and yields "", or the reason why they cannot be opened. Afterwards they stay open for
        `idle_s`, and as long as copies use them."""
        reason = await asyncio.to_thread(self._open, pages)
        try:
            yield reason
        finally:
            if not reason:
                self._release_when_idle(pages.handle)

    async def close(self) -> None:
        """Closes memory without users; memory in use is closed by its last user."""
        for handle in list(self._opened):
            await asyncio.to_thread(self._close, handle)

    def acquire(self, pages: SharedPages) -> None:
        """Keeps pages open until release(). Raises PeerMemoryError if they are closed, because the fetch
        was cancelled."""
        with self._lock:
            opened = self._opened.get(pages.handle)
            if opened is None:
                raise PeerMemoryError("pages of another worker are not open any more")
            opened.num_users += 1

    def release(self, pages: SharedPages) -> None:
        """Ends one use of opened pages and closes them after their last user. Callable from any thread."""
        if self._remove_user(pages.handle):
            self._close(pages.handle)

    def copy(self, peer: PeerBlocks, targets: U32, stream: int) -> None:
        """Enqueues copies of opened blocks to the blocks `targets` of this worker on a stream, one driver call per run
        of consecutive blocks, or per part where the pitch exceeds the driver's limit. Raises PeerMemoryError."""
        theirs, ours = peer.pages, self.own
        start, own = self._opened[theirs.handle].address + theirs.offset, self._whole.data_ptr()
        pitches = (theirs.num_blocks * theirs.part_bytes, ours.num_blocks * ours.part_bytes)
        rows = theirs.num_parts if max(pitches) <= self._max_pitch else 1
        for source, target, count in contiguous_runs(peer.blocks, targets):
            width = count * ours.part_bytes
            for part in range(0, theirs.num_parts, rows):
                source_at = start + part * pitches[0] + source * theirs.part_bytes
                target_at = own + part * pitches[1] + target * ours.part_bytes
                between = pitches if rows > 1 else (width, width)
                self._driver.copy_rows_async(
                    PitchedRows(source_at, between[0]), PitchedRows(target_at, between[1]), width, rows, stream
                )

    # On executor threads

    def _open(self, pages: SharedPages) -> str:
        """Opens another worker's memory, or counts a further user of it; returns "" or the reason why not: other sizes,
        an invalid handle or a driver error."""
        own = self.own
        if (pages.num_parts, pages.part_bytes) != (own.num_parts, own.part_bytes):
            return f"{pages.num_parts} parts of {pages.part_bytes} bytes, not {own.num_parts} of {own.part_bytes}"
        if len(pages.handle) != HANDLE_BYTES:
            return f"a handle of {len(pages.handle)} bytes"
        try:
            with self._driver_lock:
                self._driver.set_context(self._context)
                return self._open_and_count(pages)
        except PeerMemoryError as error:
            return str(error)

    def _open_and_count(self, pages: SharedPages) -> str:
        """Opens memory unless it is open, checks that the pages lie within its allocation, and counts the user; returns
        "", or the reason why they cannot be read. Raises PeerMemoryError if the driver fails."""
        opened = self._opened.get(pages.handle)
        address = self._driver.open_handle(pages.handle) if opened is None else opened.address
        counted = False
        try:
            if pages.end > self._driver.allocation_range(address)[1]:
                return f"pages end at {pages.end}, after the end of their allocation"
            with self._lock:
                self._opened.setdefault(pages.handle, _OpenedMemory(address)).num_users += 1
            counted = True
        finally:
            if opened is None and not counted:
                self._driver.close_handle(address)
        return ""

    def _release_when_idle(self, handle: bytes) -> None:
        """Ends one use, and closes the memory after `idle_s` if it has no user by then."""
        loop = asyncio.get_running_loop()
        self._remove_user(handle)
        loop.call_later(self._idle_s, lambda: loop.run_in_executor(None, self._close, handle))

    def _remove_user(self, handle: bytes) -> bool:
        """Decrements the user count; returns whether it is zero."""
        with self._lock:
            opened = self._opened[handle]
            opened.num_users -= 1
            return not opened.num_users

    def _close(self, handle: bytes) -> None:
        """Closes memory, unless it has users or is closed already; driver errors are ignored."""
        with self._driver_lock:
            with self._lock:
                opened = self._opened.get(handle)
                if opened is None or opened.num_users:
                    return
                del self._opened[handle]
            with suppress(PeerMemoryError):
                self._driver.set_context(self._context)
                self._driver.close_handle(opened.address)


def contiguous_runs(sources: U32, targets: U32) -> list[tuple[int, int, int]]:
    """Returns runs of blocks that are consecutive on both sides, as (first source, first target, length)."""
    breaks = np.flatnonzero((np.diff(sources.astype(np.int64)) != 1) | (np.diff(targets.astype(np.int64)) != 1)) + 1
    bounds = [0, *breaks.tolist(), len(sources)]
    return [(int(sources[start]), int(targets[start]), end - start) for start, end in pairwise(bounds)]
