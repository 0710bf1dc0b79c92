"""Memory of a GPU that processes on the other GPUs of its host can write to: CUDA's handles for other processes.

By the driver's own functions, for torch has none for memory that others hold an address of. No multicast.
"""

from __future__ import annotations

import ctypes
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch

from shared.logs import logger

if TYPE_CHECKING:
    from kernels.triton.rank_sums import Mailbox

log = logger("worker.ranks")

DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
LAZY_PEER_ACCESS = 1  # enabled when a handle is opened
# Of a part, while ranks are two: above it NCCL is as fast, which does not send each byte twice.
MOST_BYTES = 2 << 20


class Store(Protocol):
    """Where ranks find what others have put there; get() waits for it."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


class PeerMemoryError(RuntimeError):
    """The driver refused."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


@dataclass(frozen=True, slots=True)
class _Driver:
    library: Any

    def __call__(self, name: str, *arguments: object) -> None:
        status = getattr(self.library, name)(*arguments)
        if status:
            raise PeerMemoryError(f"{name} gave {status}")

    def allocate(self, num_bytes: int) -> int:
        """Zeros."""
        address = ctypes.c_uint64()
        self("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self("cuCtxSynchronize")
        return address.value or 0

    def handle(self, address: int) -> bytes:
        handle = _Handle()
        self("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(memoryview(handle).cast("B"))

    def open(self, handle: bytes) -> int:
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(LAZY_PEER_ACCESS))
        return address.value or 0


def open_mailbox(store: Store, rank: int, size: int, device: torch.device) -> Mailbox | None:
    """Every rank calls it. None where this one cannot reach all others; each has to ask them whether they can."""
    from kernels.triton.rank_sums import BLOCK, Mailbox, inbox_words

    num_blocks = MOST_BYTES // (size - 1) // (4 * BLOCK)
    shared = _SharedMemory()
    try:
        addresses = shared.exchange(store, rank, size, 8 * inbox_words(size, num_blocks))
    except (OSError, PeerMemoryError) as error:
        shared.free()
        log.warning("ranks add up with NCCL alone", reason=str(error))
        return None
    inboxes = torch.tensor(addresses, dtype=torch.int64, device=device)
    mailbox = Mailbox(rank, num_blocks, inboxes, torch.zeros(num_blocks, dtype=torch.int32, device=device))
    weakref.finalize(mailbox, shared.free)
    return mailbox


class _SharedMemory:
    """One piece that is ours, and those of the others, until free()."""

    def __init__(self) -> None:
        self._driver: _Driver | None = None
        self._own = 0
        self._others: list[int] = []

    def exchange(self, store: Store, rank: int, size: int, num_bytes: int) -> list[int]:
        """Addresses by rank. Whatever fails here, the others learn of it. Raises OSError, PeerMemoryError."""
        handle = b""
        try:
            self._driver = driver = _Driver(ctypes.CDLL(DRIVER))
            self._own = driver.allocate(num_bytes)
            handle = driver.handle(self._own)
        finally:
            store.set(f"inbox of {rank}", handle.hex())
        addresses = []
        for other in range(size):
            theirs = handle if other == rank else bytes.fromhex(store.get(f"inbox of {other}").decode())
            if not theirs:
                raise PeerMemoryError(f"rank {other} has no memory to share")
            addresses.append(self._own if other == rank else self._open(driver, theirs))
        return addresses

    def free(self) -> None:
        """At the end of a process there may be nothing left to be freed: the driver's answers are of no interest."""
        if self._driver is None:
            return
        for address in self._others:
            self._driver.library.cuIpcCloseMemHandle(ctypes.c_uint64(address))
        if self._own:
            self._driver.library.cuMemFree_v2(ctypes.c_uint64(self._own))

    def _open(self, driver: _Driver, handle: bytes) -> int:
        self._others.append(driver.open(handle))
        return self._others[-1]
