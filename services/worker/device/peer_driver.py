"""CUDA driver functions, absent from torch, for memory that processes of one host share between GPUs.

Covers memory allocated as a whole (cuMemAlloc, which torch's allocator uses); no multicast."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

DRIVER = "libcuda.so.1"
HANDLE_BYTES = 64
_LAZY_PEER_ACCESS = 1  # enables peer access when a handle is opened
_DEVICE_MEMORY = 2
_AT_LEAST = 0  # CU_STREAM_WAIT_VALUE_GEQ compares the difference, so that counters may wrap around


class PeerMemoryError(RuntimeError):
    """Error of a CUDA driver call on shared memory."""


class _Handle(ctypes.Structure):
    _fields_ = (("reserved", ctypes.c_char * HANDLE_BYTES),)


class _Side(ctypes.Structure):
    """Source or destination half of CUDA_MEMCPY2D."""

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
    """Driver structure CUDA_MEMCPY2D of a copy."""

    _fields_ = (("source", _Side), ("target", _Side), ("width_bytes", ctypes.c_size_t), ("height", ctypes.c_size_t))


@dataclass(frozen=True, slots=True)
class PitchedRows:
    """Two-dimensional region of device memory: address of the first row and the distance in bytes between row
    starts."""

    address: int
    pitch: int


@dataclass(frozen=True, slots=True)
class PeerDriver:
    """CUDA driver calls for the calling thread's current context. Each raises PeerMemoryError if the driver lacks the
    function or reports an error."""

    library: Any

    @classmethod
    def load(cls, name: str = DRIVER) -> PeerDriver:
        """Loads the library `name`. Raises OSError on a host without an NVIDIA driver."""
        return cls(ctypes.CDLL(name))

    def current_context(self) -> int:
        """Returns the handle of the calling thread's current context, 0 if it has none."""
        context = ctypes.c_void_p()
        self._call("cuCtxGetCurrent", ctypes.byref(context))
        return context.value or 0

    def set_context(self, context: int) -> None:
        """Makes `context` current on the calling thread."""
        self._call("cuCtxSetCurrent", ctypes.c_void_p(context))

    def allocate(self, num_bytes: int) -> int:
        """Allocates zeroed device memory and returns its address."""
        address = ctypes.c_uint64()
        self._call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemsetD8_v2", address, ctypes.c_ubyte(0), ctypes.c_size_t(num_bytes))
        self.synchronize()
        return address.value or 0

    def allocation_range(self, address: int) -> tuple[int, int]:
        """Returns the base address and size in bytes of the allocation that contains `address`."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value or 0, size.value

    def export_handle(self, address: int) -> bytes:
        """Returns the IPC handle of the whole allocation that contains `address`."""
        handle = _Handle()
        self._call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(address))
        return bytes(memoryview(handle).cast("B"))

    def open_handle(self, handle: bytes) -> int:
        """Maps another process's allocation, enables peer access to its GPU and returns the local address, valid until
        close_handle()."""
        address = ctypes.c_uint64()
        given = _Handle.from_buffer_copy(handle)
        self._call("cuIpcOpenMemHandle_v2", ctypes.byref(address), given, ctypes.c_uint(_LAZY_PEER_ACCESS))
        return address.value or 0

    def close_handle(self, address: int) -> None:
        """Unmaps the allocation that open_handle() mapped at `address`."""
        self._call("cuIpcCloseMemHandle", ctypes.c_uint64(address))

    def copy_rows_async(self, source: PitchedRows, target: PitchedRows, width: int, height: int, stream: int) -> None:
        """Enqueues a copy of `height` rows of `width` bytes on `stream`, from and to device addresses that may lie on
        different GPUs."""
        sides = (_Side(0, 0, _DEVICE_MEMORY, None, rows.address, None, rows.pitch) for rows in (source, target))
        copy = Copy2D(*sides, width, height)
        self._call("cuMemcpy2DAsync_v2", ctypes.byref(copy), ctypes.c_void_p(stream))

    def copy_bytes(self, source: int, target: int, num_bytes: int) -> None:
        """Copies bytes between two addresses and waits until the copy has finished."""
        copied = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoD_v2", *copied)
        self.synchronize()

    def copy_async(self, source: int, target: int, num_bytes: int, stream: int) -> None:
        """Enqueues a copy on `stream`. Between two GPUs a copy engine executes it."""
        copied = ctypes.c_uint64(target), ctypes.c_uint64(source), ctypes.c_size_t(num_bytes)
        self._call("cuMemcpyDtoDAsync_v2", *copied, ctypes.c_void_p(stream))

    def write_value_async(self, address: int, number: int, stream: int) -> None:
        """Enqueues a 4-byte write to any GPU's memory, visible after all earlier writes of the stream."""
        written = ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(0)
        self._call("cuStreamWriteValue32_v2", ctypes.c_void_p(stream), *written)

    def wait_value_async(self, address: int, number: int, stream: int) -> None:
        """Makes later work on `stream` wait until the 4-byte value at `address` is at least `number`; occupies no
        multiprocessor."""
        awaited = ctypes.c_uint64(address), ctypes.c_uint32(number), ctypes.c_uint(_AT_LEAST)
        self._call("cuStreamWaitValue32_v2", ctypes.c_void_p(stream), *awaited)

    def synchronize(self) -> None:
        """Waits until all work in this context has finished."""
        self._call("cuCtxSynchronize")

    def free(self, address: int) -> None:
        self._call("cuMemFree_v2", ctypes.c_uint64(address))

    def _call(self, name: str, *arguments: object) -> None:
        """Calls a driver function by name. Raises PeerMemoryError if this driver lacks it or it returns a nonzero
        status."""
        function = getattr(self.library, name, None)
        if function is None:
            raise PeerMemoryError(f"this CUDA driver does not provide {name}")
        status = function(*arguments)
        if status:
            raise PeerMemoryError(f"{name} failed with status {status}")
