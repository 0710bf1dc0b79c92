"""Memory regions whose pages can be released while their addresses stay valid."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from quire.services.worker.kv.kv_memory import GIB, free_host_bytes
from quire.shared.errors import ResourceExhausted

DONT_NEED = 4  # MADV_DONTNEED: private pages read as zeros afterwards


class SleepRegion(Protocol):
    """A memory region that loses its content when released."""

    @property
    def num_bytes(self) -> int: ...

    def release(self) -> None:
        """Releases the memory to other users; it must not be accessed until it is acquired again."""

    def acquire(self) -> None:
        """Acquires the memory, zeroed. Raises ResourceExhausted and then acquires nothing."""


class CpuRegion:
    """The whole pages of CPU tensors; bytes of a page that they share with other memory stay allocated."""

    def __init__(self, tensors: Sequence[Tensor], free_bytes: Callable[[], int] = free_host_bytes) -> None:
        """Collects the ranges of the tensors. `free_bytes`: of the host's memory."""
        self._free_bytes = free_bytes
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        ranges = [_pages(address, num_bytes) for address, num_bytes in storages.items()]
        self._ranges = [(begin, end) for begin, end in ranges if end > begin]
        self._library = ctypes.CDLL(None, use_errno=True)

    @property
    def num_bytes(self) -> int:
        return sum(end - begin for begin, end in self._ranges)

    def release(self) -> None:
        """Returns the pages to the kernel (MADV_DONTNEED). Raises OSError."""
        for begin, end in self._ranges:
            if self._library.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), DONT_NEED):
                raise OSError(ctypes.get_errno(), "madvise")

    def acquire(self) -> None:
        """Checks that the host has enough free memory, else raises ResourceExhausted: the kernel allocates the pages,
        zeroed, on first use."""
        free = self._free_bytes()
        if free < self.num_bytes:
            text = f"waking up needs {self.num_bytes / GIB:.2f} GiB, and this host has {free / GIB:.2f} GiB free"
            raise ResourceExhausted(text, retry_after_ms=1000)


def _pages(address: int, num_bytes: int) -> tuple[int, int]:
    """Returns the address range [begin, end) of the whole pages within `num_bytes` at `address`."""
    size = mmap.PAGESIZE if hasattr(mmap, "PAGESIZE") else os.sysconf("SC_PAGE_SIZE")
    return -(-address // size) * size, (address + num_bytes) // size * size
