"""Reads weights from shared memory of this host for a spool, with bounds and without mapping it.

A trainer that misreports sizes or removes its memory causes an error, where a mapping would end the process.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quire.services.worker.device.peer_driver import HANDLE_BYTES, PeerDriver, PeerMemoryError
from quire.shared import weights_memory
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.pb.common.v1.weights_stream_pb2 import SharedRun

if TYPE_CHECKING:
    import torch

AT_ONCE = 16 << 20  # bytes


def chunks(host: bytes, run: SharedRun, max_bytes: int = AT_ONCE) -> Iterator[memoryview]:
    """Yields the bytes of a run in shared memory or in another process's GPU memory; each chunk is valid until the next
    one.

    `host`: host id of the trainer; `max_bytes`: of a chunk. Raises FailedPrecondition for another host or memory that
    is gone, InvalidArgument for an invalid run.
    """
    own = weights_memory.host_id()
    if not own or host != own:
        raise FailedPrecondition(
            "shared: this worker and the trainer are on different hosts; send a stream (update_weights_from_tensor)",
            field="host",
        )
    if not run.bytes:
        raise InvalidArgument("shared: a run must have at least one byte", field="bytes")
    match run.WhichOneof("memory"):
        case "segment":
            yield from _read_segment(run, max_bytes)
        case "cuda_handle":
            yield from _read_gpu_memory(run, max_bytes)
        case _:
            raise InvalidArgument("shared: a run must have either a segment or a CUDA handle", field="shared")


def _read_segment(run: SharedRun, max_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a run in a POSIX shared memory segment, read without mapping it."""
    with _opened(run.segment) as segment:
        _check_end(run, os.fstat(segment).st_size)
        buffer = bytearray(min(max_bytes, run.bytes))
        at, end = run.offset, run.offset + run.bytes
        while at < end:
            part = memoryview(buffer)[: min(len(buffer), end - at)]
            count = os.preadv(segment, [part], at)
            if not count:
                raise FailedPrecondition(
                    f"shared: {run.segment} ends at {at}: it was truncated during the update", field="segment"
                )
            yield part[:count]
            at += count


@contextmanager
def _opened(name: str) -> Iterator[int]:
    """Opens a shared memory segment and closes it on exit.

    Raises InvalidArgument for another user's and for unexpected names, FailedPrecondition if it cannot be opened.
    """
    if not weights_memory.NAME.fullmatch(name):
        text = f"shared: {name[:80]!r} is not {weights_memory.PREFIX} and 32 hexadecimal digits"
        raise InvalidArgument(text, field="segment")
    try:
        segment = os.open(weights_memory.SEGMENTS / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise FailedPrecondition(f"shared: {name}: {error.strerror}", field="segment") from None
    try:
        status = os.fstat(segment)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise InvalidArgument(f"shared: {name} must belong to the user of this worker", field="segment")
        yield segment
    finally:
        os.close(segment)


def _check_end(run: SharedRun, num_bytes: int) -> None:
    """Raises InvalidArgument if the run ends beyond memory of `num_bytes`."""
    if run.offset + run.bytes > num_bytes:
        text = f"shared: {run.bytes} bytes from {run.offset} on, of memory that has {num_bytes}"
        raise InvalidArgument(text, field="bytes")


def _read_gpu_memory(run: SharedRun, max_bytes: int) -> Iterator[memoryview]:
    """Yields the bytes of a run in another process's GPU memory, opened by its CUDA IPC handle and closed at the end.

    Raises FailedPrecondition without a GPU or if the driver fails, InvalidArgument for an invalid handle or range.
    """
    import torch  # lazy: simulated workers have no torch

    if not torch.cuda.is_available():
        raise FailedPrecondition("shared: a CUDA handle requires a worker on a GPU", field="cuda_handle")
    if len(run.cuda_handle) != HANDLE_BYTES:
        text = f"shared: a handle of {len(run.cuda_handle)} bytes, not {HANDLE_BYTES}"
        raise InvalidArgument(text, field="cuda_handle")
    buffer = torch.empty(
        min(max_bytes, run.bytes), dtype=torch.uint8, device="cuda"
    )  # also makes the CUDA context current
    try:
        driver = PeerDriver.load()
        address = driver.open_handle(run.cuda_handle)
        try:
            _check_end(run, driver.allocation_range(address)[1])
            yield from _from_gpu(driver, address + run.offset, run.bytes, buffer)
        finally:
            driver.close_handle(address)
    except (OSError, PeerMemoryError) as error:
        raise FailedPrecondition(f"shared: the trainer's memory cannot be read: {error}", field="cuda_handle") from None


def _from_gpu(driver: PeerDriver, address: int, num_bytes: int, buffer: torch.Tensor) -> Iterator[memoryview]:
    """Yields `num_bytes` from a GPU address, copied through `buffer` to the host."""
    for start in range(0, num_bytes, len(buffer)):
        count = min(len(buffer), num_bytes - start)
        driver.copy_bytes(address + start, buffer.data_ptr(), count)
        yield memoryview(buffer[:count].cpu().numpy())  # type: ignore[arg-type]
