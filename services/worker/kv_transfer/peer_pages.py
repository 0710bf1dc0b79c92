"""Pages in the memory of another GPU of this host, copied from GPU to GPU.

A worker says where its pages lie; another one opens that memory, and its copy engine brings blocks. What is open keeps
the memory alive, also that of a process that has died: it is closed soon after the last copy, long before that process
is there again and measures how much memory is free. A copy that has begun uses it until it is done, also where nobody
waits for it any more.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
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
MAX_PITCH = (1 << 31) - 1  # between the rows of one copy; the driver takes no more
BOOT = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Where a worker's pages lie: quire.worker.v1.SharedPages."""

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
    """Blocks of another worker's pages, which are open while this is used."""

    pages: SharedPages
    blocks: U32

    def __len__(self) -> int:
        return len(self.blocks)


@dataclass(slots=True)
class _OpenedMemory:
    address: int
    num_users: int = 0


class PeerPages:
    """One worker's pages, and those of others while it copies from them. Of its event loop and its device's thread."""

    def __init__(
        self, whole: Tensor, driver: PeerDriver, *, max_pitch: int = MAX_PITCH, idle_s: float = IDLE_S
    ) -> None:
        """`whole`: int64 [num_parts, num_blocks, words], on the GPU whose context is current; `max_pitch`: bytes
        between the rows of one copy; `idle_s`: that memory stays open which nobody copies from.

        Raises PeerMemoryError."""
        self._max_pitch, self._idle_s = max_pitch, idle_s
        num_parts, num_blocks, words = whole.shape
        self._whole, self._driver, self._context = whole, driver, driver.current_context()
        base, _size = driver.allocation_range(whole.data_ptr())
        offset = whole.data_ptr() - base
        self.own = SharedPages(driver.export_handle(whole.data_ptr()), offset, num_parts, num_blocks, words * 8)
        self.host = BOOT.read_bytes().strip()
        self._opened: dict[bytes, _OpenedMemory] = {}
        self._driver_lock = threading.Lock()  # who opens or closes, which may take a while
        self._lock = threading.Lock()  # of what is counted: the device's thread takes no other

    @classmethod
    def of(cls, whole: Tensor) -> PeerPages | None:
        """None where other processes cannot have them."""
        try:
            return cls(whole, PeerDriver.load())
        except (OSError, PeerMemoryError) as error:
            log.info("pages go through this host's memory", reason=str(error))
            return None

    @asynccontextmanager
    async def opened(self, pages: SharedPages) -> AsyncIterator[str]:
        """Yields why they cannot be reached; nothing: they can."""
        reason = await asyncio.to_thread(self._open, pages)
        try:
            yield reason
        finally:
            if not reason:
                self._release_when_idle(pages.handle)

    async def close(self) -> None:
        """What nobody copies from; the rest is closed when that is done."""
        for handle in list(self._opened):
            await asyncio.to_thread(self._close, handle)

    def acquire(self, pages: SharedPages) -> None:
        """They stay open until leave(). Raises PeerMemoryError if they are not: nobody waits for this copy any more."""
        with self._lock:
            opened = self._opened.get(pages.handle)
            if opened is None:
                raise PeerMemoryError("pages of another worker are not open any more")
            opened.num_users += 1

    def release(self, pages: SharedPages) -> None:
        """Any thread. Closes them if nobody else is left: whoever opened them is gone."""
        if self._remove_user(pages.handle):
            self._close(pages.handle)

    def copy(self, peer: PeerBlocks, targets: U32, stream: int) -> None:
        """Begins to copy blocks that are in use, on a stream. Raises PeerMemoryError."""
        there, here = peer.pages, self.own
        start, own = self._opened[there.handle].address + there.offset, self._whole.data_ptr()
        pitches = (there.num_blocks * there.part_bytes, here.num_blocks * here.part_bytes)
        rows = there.num_parts if max(pitches) <= self._max_pitch else 1
        for source, target, count in contiguous_runs(peer.blocks, targets):
            width = count * here.part_bytes
            for part in range(0, there.num_parts, rows):
                source_at = start + part * pitches[0] + source * there.part_bytes
                target_at = own + part * pitches[1] + target * here.part_bytes
                between = pitches if rows > 1 else (width, width)
                self._driver.copy_rows_async(
                    PitchedRows(source_at, between[0]), PitchedRows(target_at, between[1]), width, rows, stream
                )

    # On threads that wait

    def _open(self, pages: SharedPages) -> str:
        own = self.own
        if (pages.num_parts, pages.part_bytes) != (own.num_parts, own.part_bytes):
            return f"{pages.num_parts} parts of {pages.part_bytes} bytes, for {own.num_parts} of {own.part_bytes} here"
        if len(pages.handle) != HANDLE_BYTES:
            return f"a handle of {len(pages.handle)} bytes"
        try:
            with self._driver_lock:
                self._driver.set_context(self._context)
                return self._open_and_count(pages)
        except PeerMemoryError as error:
            return str(error)

    def _open_and_count(self, pages: SharedPages) -> str:
        opened = self._opened.get(pages.handle)
        address = self._driver.open_handle(pages.handle) if opened is None else opened.address
        counted = False
        try:
            if pages.end > self._driver.allocation_range(address)[1]:
                return f"pages end at {pages.end}, behind their allocation"
            with self._lock:
                self._opened.setdefault(pages.handle, _OpenedMemory(address)).num_users += 1
            counted = True
        finally:
            if opened is None and not counted:
                self._driver.close_handle(address)
        return ""

    def _release_when_idle(self, handle: bytes) -> None:
        loop = asyncio.get_running_loop()
        self._remove_user(handle)
        loop.call_later(self._idle_s, lambda: loop.run_in_executor(None, self._close, handle))

    def _remove_user(self, handle: bytes) -> bool:
        """Whether nobody uses it now."""
        with self._lock:
            opened = self._opened[handle]
            opened.num_users -= 1
            return not opened.num_users

    def _close(self, handle: bytes) -> None:
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
    """Blocks that follow each other on both sides: the first there, the first here, and how many."""
    breaks = np.flatnonzero((np.diff(sources.astype(np.int64)) != 1) | (np.diff(targets.astype(np.int64)) != 1)) + 1
    bounds = [0, *breaks.tolist(), len(sources)]
    return [(int(sources[start]), int(targets[start]), end - start) for start, end in pairwise(bounds)]
