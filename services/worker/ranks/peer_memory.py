"""Memory of a GPU that processes on the other GPUs of its host can write to: CUDA's handles for other processes."""

from __future__ import annotations

import contextlib
import weakref
from typing import TYPE_CHECKING, Protocol

import torch

from services.worker.device.peer_driver import PeerDriver, PeerMemoryError
from shared.logs import logger

if TYPE_CHECKING:
    from kernels.triton.rank_sums import Mailbox

log = logger("worker.ranks")

# Of a part, while ranks are two: above it NCCL is as fast, which does not send each byte twice.
MOST_BYTES = 2 << 20


class Store(Protocol):
    """Where ranks find what others have put there; get() waits for it."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


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
        self._driver: PeerDriver | None = None
        self._own = 0
        self._others: list[int] = []

    def exchange(self, store: Store, rank: int, size: int, num_bytes: int) -> list[int]:
        """Addresses by rank. Whatever fails here, the others learn of it. Raises OSError, PeerMemoryError."""
        handle = b""
        try:
            self._driver = driver = PeerDriver.load()
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
            with contextlib.suppress(PeerMemoryError):
                self._driver.close(address)
        if self._own:
            with contextlib.suppress(PeerMemoryError):
                self._driver.free(self._own)

    def _open(self, driver: PeerDriver, handle: bytes) -> int:
        self._others.append(driver.open(handle))
        return self._others[-1]
