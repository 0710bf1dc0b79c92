"""A fake CUDA driver whose GPUs are host memory: allocations of any process are at their own addresses."""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from quire.services.worker.device.peer_driver import HANDLE_BYTES, PeerDriver
from quire.services.worker.kv_transfer.peer_pages import PeerPages
from tests.pointers import pointee

BEFORE = 64  # bytes of an allocation before its pages


class Library:
    """The functions of libcuda that are called. Each returns 0, or the error that a test sets."""

    def __init__(self) -> None:
        self.allocations: dict[int, torch.Tensor] = {}  # by address
        self.opened: list[int] = []
        self.refuses: set[str] = set()

    def allocate(self, num_bytes: int) -> torch.Tensor:
        memory = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        self.allocations[memory.data_ptr()] = memory
        return memory

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name in self.refuses:
            return lambda *_arguments: 201
        return object.__getattribute__(self, name)

    def cuCtxGetCurrent(self, context: Any) -> int:
        pointee(context).value = 7
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:
        assert context.value == 7
        return 0

    def cuMemGetAddressRange_v2(self, base: Any, size: Any, address: ctypes.c_uint64) -> int:
        for start, memory in self.allocations.items():
            if start <= address.value < start + len(memory):
                pointee(base).value, pointee(size).value = start, len(memory)
                return 0
        return 1

    def cuIpcGetMemHandle(self, handle: Any, address: ctypes.c_uint64) -> int:
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self.cuMemGetAddressRange_v2(ctypes.byref(base), ctypes.byref(size), address)
        told = base.value.to_bytes(8, "little") + b"h" * (HANDLE_BYTES - 8)
        ctypes.memmove(handle, told, HANDLE_BYTES)
        return 0

    def cuIpcOpenMemHandle_v2(self, address: Any, handle: Any, _flags: object) -> int:
        pointee(address).value = int.from_bytes(bytes(memoryview(handle).cast("B"))[:8], "little")
        self.opened.append(pointee(address).value)
        return 0

    def cuIpcCloseMemHandle(self, address: ctypes.c_uint64) -> int:
        self.opened.remove(address.value)
        return 0

    def cuCtxSynchronize(self) -> int:
        return 0

    def cuMemcpyDtoDAsync_v2(
        self, target: ctypes.c_uint64, source: ctypes.c_uint64, num_bytes: ctypes.c_size_t, _stream: object
    ) -> int:
        ctypes.memmove(target.value, source.value, num_bytes.value)
        return 0

    def cuMemcpy2DAsync_v2(self, copy: Any, _stream: object) -> int:
        found = pointee(copy)
        for row in range(found.height):
            source = found.source.device + row * found.source.pitch
            ctypes.memmove(found.target.device + row * found.target.pitch, source, found.width_bytes)
        return 0


def pages_of(
    library: Library, num_blocks: int, *, num_parts: int = 6, words: int = 5, **bounds: Any
) -> tuple[torch.Tensor, PeerPages]:
    """Pages and their memory: int64 [num_parts, num_blocks, words] of random bytes, within a larger allocation."""
    memory = library.allocate(BEFORE + num_parts * num_blocks * words * 8)
    whole = memory[BEFORE:].view(torch.int64).view(num_parts, num_blocks, words)
    return whole, PeerPages(whole, PeerDriver(library), **bounds)
