"""Shares a trainer's tensors in memory with workers of this host; builds the messages that describe it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, BinaryIO

from quire.shared import weights_memory
from quire.shared.errors import FailedPrecondition, ResourceExhausted
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1.weights_stream_pb2 import SharedContent, SharedRun, WeightsPiece
from quire.weights import stream as weights_stream

RUNS_IN_A_PIECE = 512


@contextmanager
def messages(
    begin: pb.UpdateWeightsRequest, named_tensors: Iterable[tuple[str, Any]]
) -> Iterator[Iterator[pb.StreamWeightsRequest]]:
    """Yields the messages. Until it ends, workers may read: tensors on GPUs in place, others from a copy. Raises
    InvalidArgument for an object that is not a torch tensor, ResourceExhausted if the copy does not fit."""
    tensors = list(named_tensors)
    heads = [weights_stream.head(name, tensor) for name, tensor in tensors]
    if not (host := weights_memory.host_id()):
        raise FailedPrecondition(
            "this host cannot be identified (no boot id); use update_weights_from_tensor, which sends a stream"
        )
    held = [tensor.detach().contiguous() for _, tensor in tensors]  # kept alive while workers may read
    with _segment() as (name, segment):
        runs = _written(held, name, segment)
        yield _stream(begin, heads, host, [run for run in runs if run.bytes])


def _stream(
    begin: pb.UpdateWeightsRequest, heads: list[Any], host: bytes, runs: list[SharedRun]
) -> Iterator[pb.StreamWeightsRequest]:
    """Yields the header, the runs of shared memory in pieces, and the end."""
    yield from weights_stream.header_messages(begin, heads)
    for start in range(0, len(runs), RUNS_IN_A_PIECE):
        part = SharedContent(host=host, runs=runs[start : start + RUNS_IN_A_PIECE])
        yield pb.StreamWeightsRequest(piece=WeightsPiece(shared=part))
    yield pb.StreamWeightsRequest(piece=WeightsPiece(end=b""))


def _written(tensors: Iterable[Any], name: str, segment: BinaryIO) -> list[SharedRun]:
    """Copies host tensors to the segment and exports GPU tensors, and returns a run for each. Raises
    ResourceExhausted if the segment has no room."""
    try:
        runs = [
            _export_gpu_tensor(tensor) if tensor.is_cuda else _copy_to_segment(tensor, name, segment)
            for tensor in tensors
        ]
        segment.flush()
    except OSError as error:
        text = f"named_tensors: {weights_memory.SEGMENTS} does not have enough space for them: {error.strerror}"
        raise ResourceExhausted(text, field="named_tensors") from None
    return runs


def _copy_to_segment(tensor: Any, name: str, segment: BinaryIO) -> SharedRun:
    content, offset = weights_stream.tensor_bytes(tensor), segment.tell()
    segment.write(content)
    return SharedRun(segment=name, offset=offset, bytes=len(content))


@contextmanager
def _segment() -> Iterator[tuple[str, BinaryIO]]:
    """Creates a locked segment: the lock shows that its trainer is alive; segments of killed trainers are removed by
    the next one."""
    _remove_abandoned()
    name = f"{weights_memory.PREFIX}{secrets.token_hex(16)}"
    path = weights_memory.SEGMENTS / name
    created = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(created, "wb") as segment:
            fcntl.flock(segment, fcntl.LOCK_EX)
            yield name, segment
    finally:
        path.unlink(missing_ok=True)


def _remove_abandoned() -> None:
    """Removes segments of processes that have died: those that no process locks."""
    for path in weights_memory.SEGMENTS.glob(f"{weights_memory.PREFIX}*"):
        with suppress(OSError), path.open("rb") as left:  # another user's, or in use
            fcntl.flock(left, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(left.fileno()).st_size:  # empty: just created and not locked yet
                path.unlink()


def _export_gpu_tensor(tensor: Any) -> SharedRun:
    """Returns the CUDA IPC handle and range of a GPU tensor, after pending computations have finished. Raises
    FailedPrecondition for memory that the driver cannot share."""
    import torch

    torch.cuda.synchronize(tensor.device)
    driver, handle = ctypes.CDLL("libcuda.so.1"), ctypes.create_string_buffer(64)
    base, size, address = ctypes.c_uint64(), ctypes.c_size_t(), ctypes.c_uint64(tensor.data_ptr())
    num_bytes = tensor.numel() * tensor.element_size()
    if not num_bytes:
        return SharedRun()
    for status in (
        driver.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address),
        driver.cuIpcGetMemHandle(handle, address),
    ):
        if status:
            text = (
                f"named_tensors: the CUDA driver cannot share this memory ({status}); memory of "
                "expandable_segments cannot be shared"
            )
            raise FailedPrecondition(text, field="named_tensors")
    offset = tensor.data_ptr() - base.value
    return SharedRun(cuda_handle=handle.raw, offset=offset, bytes=num_bytes)
