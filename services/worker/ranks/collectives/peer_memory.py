"""GPU memory that processes on other GPUs of the host can write to, shared by CUDA IPC handles."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from quire.services.worker.device.device_bytes_view import device_bytes_view
from quire.services.worker.device.peer_driver import PeerDriver, PeerMemoryError
from quire.services.worker.ranks.collectives.copy_engine_sums import CopyEngineSums, GpuStreams, region_bytes
from quire.shared.logs import logger

if TYPE_CHECKING:
    from quire.kernels.triton.rank_sums import RankMailbox
    from quire.kernels.triton.two_shot_sums import SumExchange

log = logger("worker.ranks")

# Measured on two H100s (bench_sums; figures in the worker's README). Largest part of a one-shot sum of two ranks: above
# it two-shot sums are faster, as they do not send each byte twice. With more ranks it bounds the bytes that each sends.
ONE_SHOT_MAX_BYTES = 1 << 20
# Largest part of a two-shot sum, by number of ranks: faster than NCCL at every measured size with PROGRAMS programs.
TWO_SHOT_BYTES = {2: 128 << 20}
DEFAULT_TWO_SHOT_BYTES = 64 << 20  # for numbers of ranks that were not measured
CHUNK_BYTES = 16 << 20  # summed by a rank at a time; needs twice as much memory for each other rank
PROGRAMS = 64  # multiprocessors used; 8 are faster by 1 us up to 2 MiB, and slower above


class RankStore(Protocol):
    """Key-value store of the ranks; get() waits for the key."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def open_mailbox(
    store: RankStore,
    rank: int,
    size: int,
    device: torch.device,
    *,
    load_driver: Callable[[], PeerDriver] = PeerDriver.load,
) -> RankMailbox | None:
    """Opens one-shot sums; every rank must call it. Returns None if this rank cannot reach all others; the ranks then
    have to agree on the outcome."""
    from quire.kernels.triton.rank_sums import BLOCK, RankMailbox, inbox_words

    num_blocks = ONE_SHOT_MAX_BYTES // (size - 1) // (4 * BLOCK)
    shared = _share(store, rank, size, 8 * inbox_words(size, num_blocks), "inbox", load_driver=load_driver)
    if shared is None:
        return None
    inboxes = torch.tensor(shared.addresses, dtype=torch.int64, device=device)
    mailbox = RankMailbox(rank, num_blocks, inboxes, torch.zeros(num_blocks, dtype=torch.int32, device=device))
    weakref.finalize(mailbox, shared.free)
    return mailbox


def open_exchange(
    store: RankStore, rank: int, size: int, device: torch.device, *, num_programs: int = PROGRAMS, name: str = "region"
) -> SumExchange | None:
    """Opens two-shot sums; every rank must call it. Returns None if this rank cannot reach all others; the ranks then
    have to agree on the outcome. `name`: distinguishes several exchanges."""
    from quire.kernels.triton import two_shot_sums
    from quire.kernels.triton.two_shot_sums import BLOCK_BYTES, SumExchange

    chunk_bytes = CHUNK_BYTES // (size - 1) // BLOCK_BYTES * BLOCK_BYTES
    shared = _share(store, rank, size, two_shot_sums.region_bytes(size, chunk_bytes), name)
    if shared is None:
        return None
    regions = torch.tensor(shared.addresses, dtype=torch.int64, device=device)
    calls = torch.zeros(num_programs, dtype=torch.int32, device=device)
    exchange = SumExchange(rank, chunk_bytes, num_programs, regions, calls)
    weakref.finalize(exchange, shared.free)
    return exchange


def open_copy_engine_sums(store: RankStore, rank: int, size: int, device: torch.device) -> CopyEngineSums | None:
    """Opens overlapped sums of two ranks; both must call it. Returns None for more ranks, or if this rank cannot reach
    the other or lacks driver functions. The caller then checks is_peer_ready() and agrees on the outcome."""
    shared = _share(store, rank, size, region_bytes(), "copies") if size == 2 else None
    if shared is None:
        return None
    own, peer = shared.addresses[rank], shared.addresses[1 - rank]
    sums = CopyEngineSums(PeerDriver.load(), device_bytes_view(own, region_bytes(), device), peer, GpuStreams(device))
    weakref.finalize(sums, shared.free)
    try:
        sums.probe_peer()
    except PeerMemoryError as error:
        log.warning("overlap of all-reduce and products is disabled", reason=str(error))
        return None
    return sums


def uses_two_shot(x: torch.Tensor, size: int) -> bool:
    """Returns whether a part too large for one shot is summed in two; the same on all ranks."""
    from quire.kernels.triton.two_shot_sums import two_shot_sum_takes

    return x.nbytes <= TWO_SHOT_BYTES.get(size, DEFAULT_TWO_SHOT_BYTES) and two_shot_sum_takes(x)


def _share(
    store: RankStore,
    rank: int,
    size: int,
    num_bytes: int,
    name: str,
    *,
    load_driver: Callable[[], PeerDriver] = PeerDriver.load,
) -> _SharedMemory | None:
    """Allocates zeroed memory, shares it with all ranks under `name` and maps theirs; logs the reason and returns None
    if this rank cannot reach all others."""
    shared = _SharedMemory(load_driver)
    try:
        shared.exchange(store, rank, size, num_bytes, name)
    except (OSError, PeerMemoryError) as error:
        shared.free()
        log.warning("ranks cannot share GPU memory; all-reduce uses NCCL", reason=str(error))
        return None
    return shared


class _SharedMemory:
    """Memory of this rank and mappings of the other ranks' memory, until free()."""

    def __init__(self, load_driver: Callable[[], PeerDriver]) -> None:
        self._load_driver = load_driver
        self._driver: PeerDriver | None = None
        self._own = 0
        self._others: list[int] = []
        self.addresses: list[int] = []  # by rank, once exchanged

    def exchange(self, store: RankStore, rank: int, size: int, num_bytes: int, name: str) -> None:
        """Allocates memory and maps the others' under `name`. A failure is published to the other ranks. Raises
        OSError, PeerMemoryError."""
        handle = b""
        try:
            self._driver = driver = self._load_driver()
            self._own = driver.allocate(num_bytes)
            handle = driver.export_handle(self._own)
        finally:
            store.set(f"{name} of {rank}", handle.hex())
        for other in range(size):
            theirs = handle if other == rank else bytes.fromhex(store.get(f"{name} of {other}").decode())
            if not theirs:
                raise PeerMemoryError(f"rank {other} has no memory to share")
            self.addresses.append(self._own if other == rank else self._open(driver, theirs))

    def free(self) -> None:
        """Frees memory and mappings; driver errors are ignored, as the context may be gone at process exit."""
        if self._driver is None:
            return
        for address in self._others:
            with contextlib.suppress(PeerMemoryError):
                self._driver.close_handle(address)
        if self._own:
            with contextlib.suppress(PeerMemoryError):
                self._driver.free(self._own)

    def _open(self, driver: PeerDriver, handle: bytes) -> int:
        self._others.append(driver.open_handle(handle))
        return self._others[-1]
