"""GPU memory with a fixed address whose physical pages can be released and mapped again.

CUDA graphs contain addresses, so released memory must return at the same address. Torch has no API for this: the module
calls the driver's virtual memory functions, which reserve an address once and then map and unmap pages there."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch
from torch import Tensor

from quire.services.worker.device.device_bytes_view import device_bytes_view
from quire.services.worker.kv.kv_memory import GIB
from quire.shared.errors import FailedPrecondition, ResourceExhausted

DRIVER = "libcuda.so.1"
OUT_OF_MEMORY = 2
PINNED, DEVICE, READ_WRITE, MINIMUM = 1, 1, 3, 0  # the driver's enumerations
PIECE_BYTES = 256 << 20  # mapped at a time


class _Location(ctypes.Structure):
    """Driver structure CUmemLocation of a GPU."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Flags(ctypes.Structure):
    """Allocation flags within CUmemAllocationProp."""

    _fields_ = (
        ("compression", ctypes.c_ubyte),
        ("direct_rdma", ctypes.c_ubyte),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 4),
    )


class _Properties(ctypes.Structure):
    """Mirrors the CUDA driver's structure CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", _Flags),
    )


class _Access(ctypes.Structure):
    """Mirrors the CUDA driver's structure CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class DriverError(RuntimeError):
    """A CUDA driver call that failed."""

    def __init__(self, name: str, status: int) -> None:
        super().__init__(f"{name} failed with status {status}")
        self.status = status


class VirtualMemory:
    """Virtual memory functions of the CUDA driver for one GPU. They raise DriverError."""

    def __init__(self, device: int, library: Any = None, driver: str = DRIVER) -> None:
        """`library`: replaces the library with the name `driver` in tests. Raises FailedPrecondition where there is no
        driver."""
        try:
            self._library = library or ctypes.CDLL(driver)
        except OSError as error:
            raise FailedPrecondition(f"enable_sleep_mode: {error}", field="enable_sleep_mode") from None
        location = _Location(DEVICE, device)
        self._properties = _Properties(PINNED, 0, location)
        self._access = _Access(location, READ_WRITE)
        self.granularity = self._granularity()

    def _granularity(self) -> int:
        """Returns the bytes that sizes and addresses of mappings must be multiples of."""
        granularity = ctypes.c_size_t()
        self._call(
            "cuMemGetAllocationGranularity",
            ctypes.byref(granularity),
            ctypes.byref(self._properties),
            ctypes.c_int(MINIMUM),
        )
        return granularity.value

    def reserve(self, num_bytes: int) -> int:
        """Reserves a range of GPU addresses without memory and returns its start. Raises DriverError."""
        address = ctypes.c_uint64()
        nothing = ctypes.c_size_t(0), ctypes.c_uint64(0), ctypes.c_uint64(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), ctypes.c_size_t(num_bytes), *nothing)
        return address.value

    def map_pages(self, address: int, num_bytes: int) -> int:
        """Maps new pages at a reserved address; returns their handle. Raises DriverError and then maps nothing."""
        handle, where, size = ctypes.c_uint64(), ctypes.c_uint64(address), ctypes.c_size_t(num_bytes)
        self._call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(self._properties), ctypes.c_uint64(0))
        try:
            self._call("cuMemMap", where, size, ctypes.c_size_t(0), handle, ctypes.c_uint64(0))
            self._call("cuMemSetAccess", where, size, ctypes.byref(self._access), ctypes.c_size_t(1))
        except DriverError:
            with contextlib.suppress(DriverError):
                self._call("cuMemUnmap", where, size)
            self._call("cuMemRelease", handle)
            raise
        return handle.value

    def unmap_pages(self, address: int, num_bytes: int, handle: int) -> None:
        """Unmaps pages and frees their memory; the address stays reserved."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))
        self._call("cuMemRelease", ctypes.c_uint64(handle))

    def _call(self, name: str, *arguments: object) -> None:
        """Calls a driver function; raises DriverError for a nonzero status."""
        status = getattr(self._library, name)(*arguments)
        if status:
            raise DriverError(name, status)


class CudaRegion:
    """GPU memory region used by one thread; no work may be running on it when its pages change."""

    def __init__(self, num_bytes: int, memory: VirtualMemory) -> None:
        """Reserves the address range for `num_bytes`, rounded up to the granularity; no page is mapped. Raises
        DriverError."""
        self._memory = memory
        piece = -(-PIECE_BYTES // memory.granularity) * memory.granularity
        self.num_bytes = max(memory.granularity, -(-num_bytes // memory.granularity) * memory.granularity)
        self._address = memory.reserve(self.num_bytes)
        starts = range(0, self.num_bytes, piece)
        self._pieces = [(self._address + at, min(piece, self.num_bytes - at)) for at in starts]
        self._handles: list[int] = []  # of the mapped pieces, which are the first ones

    def acquire(self, num_bytes: int | None = None) -> None:
        """Maps pages up to `num_bytes`, or all of them. Raises ResourceExhausted and then maps nothing."""
        wanted, before = self.num_bytes if num_bytes is None else num_bytes, len(self._handles)
        try:
            for address, size in self._pieces[before:]:
                if address - self._address >= wanted:
                    break
                self._handles.append(self._memory.map_pages(address, size))
        except DriverError as error:
            self._release_from(before)
            if error.status != OUT_OF_MEMORY:
                raise
            text = f"the device has less than the {self.num_bytes / GIB:.2f} GiB of free memory needed to wake up"
            raise ResourceExhausted(text, retry_after_ms=1000) from None

    def release(self) -> None:
        """Waits for the device, then unmaps and frees all pages; the addresses stay reserved and the content is
        lost."""
        torch.cuda.synchronize()
        self._release_from(0)

    def _release_from(self, first: int) -> None:
        """Unmaps the pieces from index `first` on, last one first."""
        while len(self._handles) > first:
            handle = self._handles.pop()
            self._memory.unmap_pages(*self._pieces[len(self._handles)], handle)

    def tensor(self, device: torch.device) -> Tensor:
        """Returns a uint8 tensor over the whole region; unmapped parts must not be accessed. Some page must be mapped,
        as torch looks up the device of the address."""
        return device_bytes_view(self._address, self.num_bytes, device)
