"""Ring buffer for commands from rank 0 to the other ranks of its host: one copy in shared memory, read by each at its
pace.

The memory has no name, so killed processes leave nothing behind. The writer and each reader count bytes in separate
words. On processors that reorder stores (ARM) the system call that wakes a reader orders them; readers there are always
woken."""

from __future__ import annotations

import mmap
import os
import platform
import select
import struct
import time
from collections.abc import Callable
from multiprocessing.reduction import DupFd
from typing import Protocol

CAPACITY = 1 << 22  # bytes; longer commands are read while they are written
WORDS = 8  # a cache line
HEAD = struct.Struct("=I")  # length of the following command
POLL_INTERVAL_S = 0.05  # bounds the delay of a lost wake-up
FULL_PAUSE_S = 1e-4
STORES_IN_ORDER = platform.machine() == "x86_64"

# Word indices within a line.
COUNT, ASLEEP, HEARTBEAT = 0, 1, 2


class _Memory:
    """Shared memory: one line of words for the writer, one per reader, then the bytes of the ring."""

    def __init__(self, descriptor: int, num_readers: int, capacity: int) -> None:
        self.capacity = capacity
        self._lines = (1 + num_readers) * WORDS * 8
        self._map = mmap.mmap(descriptor, self._lines + capacity)
        with memoryview(self._map) as whole, whole[: self._lines] as lines:
            self.words = lines.cast("Q")  # each word has one writing process; writes are atomic
            self.bytes = whole[self._lines :]

    @staticmethod
    def size(num_readers: int, capacity: int) -> int:
        return (1 + num_readers) * WORDS * 8 + capacity

    def close(self) -> None:
        self.words.release()
        self.bytes.release()
        self._map.close()

    def copy_in(self, count: int, data: memoryview) -> None:
        """Copies data, at most the capacity, into the ring at byte count `count`, wrapping around."""
        at = count % self.capacity
        first = min(len(data), self.capacity - at)
        self.bytes[at : at + first] = data[:first]
        self.bytes[: len(data) - first] = data[first:]

    def copy_out(self, count: int, size: int) -> bytes:
        """Returns `size` bytes of the ring from byte count `count` on, wrapping around."""
        at = count % self.capacity
        first = min(size, self.capacity - at)
        return bytes(self.bytes[at : at + first]) + bytes(self.bytes[: size - first])


class Ring:
    """Writing end, in rank 0. One thread writes at a time."""

    def __init__(self, num_readers: int, capacity: int = CAPACITY) -> None:
        """Creates the shared memory and one eventfd per reader to wake it."""
        self._num_readers, self._capacity = num_readers, capacity
        self._descriptor = os.memfd_create("quire-ranks", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, _Memory.size(num_readers, capacity))
        self._eventfds = [os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(num_readers)]
        self._memory = _Memory(self._descriptor, num_readers, capacity)
        self._written = 0

    def reader(self, number: int) -> RingReader:
        """Returns the reading end for a process, to be passed when it is started."""
        return RingReader(self._descriptor, self._eventfds[number], number, self._num_readers, self._capacity)

    def write(self, data: bytes, timeout_s: float) -> int | None:
        """Writes a command and wakes the readers, waiting for space; returns None, or the slowest reader's number if
        there was no space for `timeout_s`, after which the ring is unusable."""
        words = self._memory.words
        remaining = memoryview(HEAD.pack(len(data)) + data)
        deadline = 0.0
        while remaining:
            slowest = min(range(self._num_readers), key=lambda number: words[(1 + number) * WORDS + COUNT])
            space = self._capacity - (self._written - words[(1 + slowest) * WORDS + COUNT])
            if not space:
                deadline = deadline or time.monotonic() + timeout_s
                if time.monotonic() > deadline:
                    return slowest
                time.sleep(FULL_PAUSE_S)
                continue
            self._memory.copy_in(self._written, remaining[:space])
            self._written += len(remaining[:space])
            words[COUNT] = self._written
            remaining = remaining[space:]
            self._wake()
        return None

    def heartbeat(self, number: int) -> int:
        """Returns the reader's counter, which grows while it is alive: see RingReader.send_heartbeat()."""
        return self._memory.words[(1 + number) * WORDS + HEARTBEAT]

    def close(self) -> None:
        """Frees the writer's resources; readers keep theirs."""
        for descriptor in (self._descriptor, *self._eventfds):
            os.close(descriptor)
        self._eventfds = []
        self._memory.close()

    def _wake(self) -> None:
        """Wakes the readers that are asleep; all of them where stores may be reordered."""
        for number, eventfd in enumerate(self._eventfds):
            if not STORES_IN_ORDER or self._memory.words[(1 + number) * WORDS + ASLEEP]:
                os.eventfd_write(eventfd, 1)


class RingReader:
    """Reading end. Pickled for the rank's process; one thread reads there."""

    def __init__(self, descriptor: int, eventfd: int, number: int, num_readers: int, capacity: int) -> None:
        self._descriptor, self._eventfd = descriptor, eventfd
        self._number, self._num_readers, self._capacity = number, num_readers, capacity
        self._memory: _Memory | None = None
        self._count = 0

    def __reduce__(self) -> tuple[Callable[..., RingReader], tuple[object, ...]]:
        sizes = (self._number, self._num_readers, self._capacity)
        return _rebuild_reader, (DupFd(self._descriptor), DupFd(self._eventfd), *sizes)

    def read(self) -> bytes:
        """Waits for the next command and returns it; the writer may then overwrite its bytes."""
        (size,) = HEAD.unpack(self._read_exactly(HEAD.size))
        return self._read_exactly(size)

    def send_heartbeat(self) -> None:
        """Increments the reader's heartbeat counter."""
        self._words[self._line + HEARTBEAT] += 1

    @property
    def _line(self) -> int:
        return (1 + self._number) * WORDS

    @property
    def _words(self) -> memoryview[int]:
        return self._open().words

    def _open(self) -> _Memory:
        """Maps the shared memory on first use, in the reader's process."""
        if self._memory is None:
            self._memory = _Memory(self._descriptor, self._num_readers, self._capacity)
        return self._memory

    def _read_exactly(self, size: int) -> bytes:
        """Returns the next `size` bytes, sleeping while they are not written, and publishes the new read count."""
        memory, parts = self._open(), []
        while size:
            ready = min(size, memory.words[COUNT] - self._count)
            if not ready:
                self._sleep(memory)
                continue
            parts.append(memory.copy_out(self._count, ready))
            self._count += ready
            size -= ready
            memory.words[self._line + COUNT] = self._count
        return b"".join(parts)

    def _sleep(self, memory: _Memory) -> None:
        """Waits at most POLL_INTERVAL_S for a wake-up, unless data arrived before the reader was marked as asleep."""
        memory.words[self._line + ASLEEP] = 1
        if memory.words[COUNT] == self._count and select.select([self._eventfd], [], [], POLL_INTERVAL_S)[0]:
            os.eventfd_read(self._eventfd)
        memory.words[self._line + ASLEEP] = 0


class _InheritedFd(Protocol):
    """A file descriptor passed to a process."""

    def detach(self) -> int: ...


def _rebuild_reader(
    descriptor: _InheritedFd, eventfd: _InheritedFd, number: int, num_readers: int, capacity: int
) -> RingReader:
    """Unpickles a reader from duplicated file descriptors."""
    return RingReader(descriptor.detach(), eventfd.detach(), number, num_readers, capacity)
