"""The driver's functions for memory that processes of one host share between GPUs: torch has none.

Of memory that is allocated as a whole (cuMemAlloc, which is what torch's allocator takes); no multicast.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # enabled when a handle is opened
_DEVICE_MEMORY = 2
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ: of the difference, so that numbers may begin anew


class PeerMemoryError(RuntimeError):
    """The driver refused."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Side(ctypes.Structure):
    """Half of CUDA_MEMCPY2D."""

    _fields_ = (
        ("x_bytes", ctypes.c_size_t),
        ("y", ctypes.c_size_t),
        ("memory_type", ctypes.c_int),
        ("host", ctypes.c_void_p),
        ("device", ctypes.c_uint64),
        ("array", ctypes.c_void_p),
        ("pitch", ctypes.c_size_t),
    )


class Copy2D(ctypes.Structure):
    """CUDA_MEMCPY2D."""

    _fields_ = (("source", _Side), ("target", _Side), ("width_bytes", ctypes.c_size_t), ("height", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class PitchedRows:
    """Where the first begins, and how many bytes lie from one beginning to the next."""

    address: int
    pitch: int


@dataclass(frozen=True, slots=True)
class PeerDriver:
    """For the context that is current on the calling thread. Each function raises PeerMemoryError."""

    library: Any

    @classmethod
    def load(cls) -> PeerDriver:
        """Raises OSError where there is no driver."""
        return cls(ctypes.CDLL(DRIVER))

    def current_context(self) -> int:
        """The one that is current."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def set_context(self, context: int) -> None:
        """On the calling thread, for good."""
        self._call("cuCtxSetCurrent", ctypes.c_void_p(context))

    def allocate(self, num_bytes: int) -> int:
        """Zeros."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self.synchronize()
        return address.value or 0

    def allocation_range(self, address: int) -> tuple[int, int]:
        """Where the allocation begins that an address is in, and its size in bytes."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value or 0, size.value

    def export_handle(self, address: int) -> bytes:
        """Of the whole allocation that the address is in."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(memoryview(handle).cast("B"))

    def open_handle(self, handle: bytes) -> int:
        """Another process's allocation: its address here, until close()."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value or 0

    def close_handle(self, address: int) -> None:
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy_rows_async(self, source: PitchedRows, target: PitchedRows, width: int, height: int, stream: int) -> None:
        """Begins to copy `height` rows of `width` bytes."""
        there, here = (_Side(0, 0, _DEVICE_MEMORY, None, rows.address, None, rows.pitch) for rows in (source, target))
        copy = Copy2D(there, here, width, height)
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def copy_bytes(self, source: int, target: int, num_bytes: int) -> None:
        """From one address to another; returns when it is done."""
        copied = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoD_v2", *copied)
        self.synchronize()

    def copy_async(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        """Behind what the stream has to do so far. Between two GPUs that is the work of a copy engine."""
        copied = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoDAsync_v2", *copied, ctypes.c_void_p(stream))

    def write_value_async(self, address: int, number: int, stream: int) -> None:
        """4 bytes, in any GPU's memory, once all that the stream has written before can be seen."""
        written = ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(0)
        self._call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream), *written)

    def wait_value_async(self, address: int, number: int, stream: int) -> None:
        """What follows on the stream waits for 4 bytes here to be as much or more; no multiprocessor does."""
        awaited = ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(_AT_LEAST)
        self._call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), *awaited)

    def synchronize(self) -> None:
        """All that was begun in this context is done."""
        self._call("cuCtxSynchronize")

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        function = getattr(self.library, name, None)
        if function is None:
            raise PeerMemoryError(f"this driver has no {name}")
        status = function(*arguments)
        if status:
            raise PeerMemoryError(f"{name} gave {status}")
